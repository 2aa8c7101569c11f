"""An optimizer's step applied to some of its parameters at a time, with the hyperparameters at the time of `step()`.

Only if that equals one whole step: the optimizer treats each parameter independently, and no hook observes the step as
a whole.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.runtime.loop.optimizer_kinds import is_separable
from weft.runtime.loop.step_hooks import has_step_hooks
from weft.strategy import Strategy

log = logging.getLogger(__name__)


def why_not_partial(model: nn.Module, optimizer: Optimizer) -> str | None:
    """Why this model's parameters cannot be updated one after another; None if they can."""
    if not is_separable(optimizer):
        return f"{type(optimizer).__name__} may use several parameters at once"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "a differentiable optimizer steps as a whole"
    if has_step_hooks(optimizer):
        return "hooks on the optimizer expect a whole step"
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(p.requires_grad and id(p) not in stepped for p in model.parameters()):
        return "the optimizer leaves some parameters to another one"
    odd = next((type(p).__name__ for p in model.parameters() if type(p) is not nn.Parameter), None)
    if odd is not None:
        return f"a parameter of class {odd} cannot be lazy"
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return "compiled code does not wait for a parameter"
        if isinstance(module, torch.jit.ScriptModule):
            return "a scripted module does not wait for a parameter"
    return None


def may_defer(strategy: Strategy, model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether parameters are updated as their gradients arrive; logs the reason where the schedule wants it in vain."""
    if not strategy.schedule.defers or strategy.synchrony.eager:  # prefetching servers have nothing to defer
        return False
    why = why_not_partial(model, optimizer)
    if why:
        log.warning("%s, so the next forward waits for the whole update: right, but with less overlap", why)
    return why is None


def has_scaler(optimizer: Optimizer) -> bool:
    """Whether a GradScaler steps this optimizer with its fused check, which looks for non-finite gradients itself."""
    return getattr(optimizer, "found_inf", None) is not None


class PartialStep:
    """The same optimizer with shared state and its own parameter groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        own = vars(optimizer).get("step")
        self._step: Callable[[Any], Any] = own.__func__ if isinstance(own, MethodType) else type(optimizer).step
        self._optimizer = optimizer
        self._part = object.__new__(type(optimizer))
        vars(self._part).update(vars(optimizer))
        self._part._optimizer_step_pre_hooks = OrderedDict()
        self._part._optimizer_step_post_hooks = OrderedDict()

    def freeze(self) -> Callable[[Sequence[Tensor]], None]:
        """A step with the present hyperparameters, to be applied to some parameters at a time."""
        groups = [{key: _kept(value) for key, value in group.items()} for group in self._optimizer.param_groups]
        group_of = {id(p): at for at, group in enumerate(groups) for p in group["params"]}
        self._part.state = self._optimizer.state

        def step(parameters: Sequence[Tensor]) -> None:
            mine: dict[int, list[Tensor]] = {}
            for parameter in parameters:
                if id(parameter) in group_of:
                    mine.setdefault(group_of[id(parameter)], []).append(parameter)
            self._part.param_groups = [groups[at] | {"params": chosen} for at, chosen in mine.items()]
            if mine:
                device = next(iter(mine.values()))[0].device.type
                with (
                    torch.inference_mode(False),
                    torch.autocast(device, enabled=False),
                ):  # not the context of the access
                    self._step(self._part)

        return step


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
