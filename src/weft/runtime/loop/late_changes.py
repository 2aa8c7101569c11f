"""Refuses changes to the model that bypass the exchange of gradients.

A single process may at any time add a layer, set a gradient by hand, or step a second optimizer. If the other workers
did not see such a change, replicas would silently diverge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from weft.errors import LoopError


class LateChanges:
    """The parameters, hooks and optimizers of one model at the time of `distribute`."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, others: Sequence[Any], hooked: Sequence[Tensor] = ()
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.in_backward = False
        self._known = {id(param): param for param in model.parameters()}
        self._others = [other for other in others if isinstance(other, Optimizer)]
        self._hooked = [(param, _post_hooks(param)) for param in hooked]
        self._count = _count(optimizer)
        self._changed = self._stepping = False
        self._handles = [
            register_optimizer_step_pre_hook(self._about_to_step),
            modules.register_module_parameter_registration_hook(self._registered),
            modules.register_module_module_registration_hook(self._registered),
        ]

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def check_parameters(self) -> None:
        """Refuse parameters that were added to the model or its optimizer."""
        if not self._changed and self._count == _count(self.optimizer):
            return
        self._changed, self._count = False, _count(self.optimizer)
        found = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        found += [("a parameter of the optimizer", p) for group in self.optimizer.param_groups for p in group["params"]]
        for name, param in found:
            if id(param) not in self._known:
                raise LoopError(
                    f"{name}, of shape {tuple(param.shape)}, was added after run.distribute(), and the other workers "
                    "do not have it; build the whole model before that call, and freeze parameters that train later"
                )

    def check_hooks(self) -> None:
        """Refuse hooks that would run after Weft's own, on a gradient that is already being exchanged."""
        for param, hooks in self._hooked:
            if _post_hooks(param) != hooks:
                raise LoopError(
                    "a post-accumulate hook was registered on a parameter after run.distribute(), and would see a "
                    "gradient that is being exchanged; register it before that call, or act between backward and step"
                )

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Allow wrapped optimizers to step while the distributed optimizer steps."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def _about_to_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        if self._stepping or optimizer.state is self.optimizer.state:
            return
        if not any(id(p) in self._known for group in optimizer.param_groups for p in group["params"]):
            return
        if self.in_backward:
            raise LoopError(
                f"{type(optimizer).__name__} steps inside backward, with gradients that were not exchanged yet; "
                "call step() after backward has returned"
            )
        if not any(optimizer is other for other in self._others):
            raise LoopError(
                f"{type(optimizer).__name__} steps parameters of the model, but was not passed to run.distribute(); "
                "pass it after the first one: run.distribute(model, optimizer, second)"
            )

    def _registered(self, module: nn.Module, name: str, value: Any) -> None:
        self._changed = True


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _post_hooks(param: Tensor) -> int:
    """The number of the user's hooks; Weft's own are not counted."""
    hooks = (param._post_accumulate_grad_hooks or {}).values()
    return sum(not str(getattr(hook, "__module__", "")).startswith("weft.") for hook in hooks)


def compiled() -> bool:
    """Whether anything in this process was passed to `torch.compile`."""
    frames = getattr(torch, "_dynamo", None) and getattr(torch._dynamo, "eval_frame", None)
    return any(backend is not None for backend in getattr(frames, "cached_backends", {}).values())
