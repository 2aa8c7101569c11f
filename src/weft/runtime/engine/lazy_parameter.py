"""A parameter with a pending update. The first access waits for the update.

While an update is pending, the parameter's class is `LazyParameter`, and `__torch_function__` intercepts every access:
a layer's forward, tied weights, an average of the weights, `state_dict`, a print. After the update it is an ordinary
`nn.Parameter` again.
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

from weft.runtime.loop.tensor_metadata import METADATA_READS

Touched = Callable[["LazyParameter"], None]
"""Called when a lazy parameter or its gradient is accessed; returns when the parameter is updated."""


class LazyParameter(nn.Parameter):
    """An `nn.Parameter` whose update is pending."""

    _touched: Touched
    _kind: type[nn.Parameter]
    """The class of the parameter once it is updated."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA_READS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with _outside_transforms():
            for parameter in pytree.tree_leaves((args, kwargs)):
                if type(parameter) is LazyParameter:  # updating one parameter may have updated others
                    parameter._touched(parameter)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._touched(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._touched(self)
        return self.__reduce_ex__(protocol)


def _outside_transforms() -> AbstractContextManager[Any]:
    """Suspend torch.func transforms: an update is not part of the transformed function, even if that waits for it."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def make_lazy(parameter: Tensor, touched: Touched) -> None:
    """Make every access to the parameter call `touched`."""
    if type(parameter) is not LazyParameter:
        parameter._kind = type(parameter)  # type: ignore[attr-defined]
        parameter.__class__ = LazyParameter
    parameter._touched = touched  # type: ignore[attr-defined]


def make_ready(parameter: Tensor) -> None:
    """Restore the parameter's original class."""
    if type(parameter) is LazyParameter:
        kind = parameter._kind
        del parameter._touched, parameter._kind
        parameter.__class__ = kind  # type: ignore[assignment]
