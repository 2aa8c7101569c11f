"""A parameter that is late: its update is on its way, and the first to touch the parameter waits for it.

While a parameter is late its class is `LazyParameter`, and torch asks that class before anything is done with it. So it
does not matter who comes first: a layer's forward, tied weights, an average of the weights, `state_dict`, a print. On
arrival it is an ordinary `nn.Parameter` again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

Touched = Callable[["LazyParameter"], None]
"""Called when a late parameter, or its gradient, is touched; returns when the parameter has arrived."""


class LazyParameter(nn.Parameter):
    """An `nn.Parameter` that somebody must wait for."""

    _touched: Touched
    _kind: type[nn.Parameter]
    """What it is when it is not late."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with _outside_transforms():
            for parameter in pytree.tree_leaves((args, kwargs)):
                if type(parameter) is LazyParameter:  # one that arrives may bring others along
                    parameter._touched(parameter)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._touched(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._touched(self)
        return self.__reduce_ex__(protocol)


_HARMLESS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_cuda", "is_sparse")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.is_complex}


def _outside_transforms() -> AbstractContextManager[Any]:
    """An update is not part of the function that torch.func transforms, even where that function waits for it."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def make_lazy(parameter: Tensor, touched: Touched) -> None:
    """From now on, whoever touches the parameter is held up by `touched`."""
    if type(parameter) is not LazyParameter:
        parameter._kind = type(parameter)  # type: ignore[attr-defined]
        parameter.__class__ = LazyParameter
    parameter._touched = touched  # type: ignore[attr-defined]


def make_ready(parameter: Tensor) -> None:
    """The parameter is what it was before."""
    if type(parameter) is LazyParameter:
        kind = parameter._kind
        del parameter._touched, parameter._kind
        parameter.__class__ = kind  # type: ignore[assignment]
