"""Refuses changes by the loop between the passes of several logical workers in one process.

A process that carries n workers runs the body of the loop n times per step, and only the last pass has the step's
gradients and takes the step. Code that reads or changes parameters, gradients, hyperparameters or the optimizer's state
in earlier passes would act n times per step, or on a gradient that does not exist yet.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import LoopError
from weft.runtime.engine.lazy_parameter import make_lazy, make_ready

_WHY = "this process carries several workers, and the loop's body runs once for each of them"


class BetweenPasses:
    """Watches a model and its optimizer from the end of a worker's backward to the next worker's batch."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        self.model, self.optimizer, self.params = model, optimizer, params
        self.between = False
        """Whether a worker's pass is over and the next worker has no batch yet."""
        self._counters = _counters(model)
        model.register_forward_pre_hook(lambda *_: self._show())
        model.register_forward_hook(lambda *_: self.hide(), always_call=True)
        zero_grad = model.zero_grad

        def weft_zero_grad(_: nn.Module, set_to_none: bool = True) -> None:
            if not self.between:
                zero_grad(set_to_none)

        model.zero_grad = MethodType(weft_zero_grad, model)  # type: ignore[method-assign]

    def pass_ended(self) -> None:
        """A worker's backward is complete, and it is not the last one of this process."""
        self._check_counters()
        self._before = _snapshot(self.optimizer)
        self.between = True
        self.hide()

    def next_pass(self) -> None:
        """The next worker has its batch, or the step is about to be taken."""
        if not self.between:
            return
        self._show()
        self.between = False
        if _snapshot(self.optimizer) != self._before:
            raise LoopError(
                f"hyperparameters or the optimizer's state were changed between two workers' passes: {_WHY}; use a "
                "scheduler and pass it to run.distribute(), or start a process for each worker"
            )

    def hide(self) -> None:
        """Refuse every access to a parameter while no worker has a batch."""
        if self.between:
            for param in self.params:
                make_lazy(param, self._touched)

    def _show(self) -> None:
        if self.between:
            for param in self.params:
                make_ready(param)

    def _touched(self, param: Tensor) -> None:
        if _clipping():
            make_ready(param)
            return
        raise LoopError(
            f"a parameter or its gradient was used between two workers' passes: {_WHY}; put all but the last backward "
            "into `with run.accumulate():`, clip with run.clip(), pass averages of the weights, scalers and further "
            "optimizers to run.distribute(), or start a process for each worker"
        )

    def _check_counters(self) -> None:
        """A module that counts its calls would count the calls of all workers."""
        now = _counters(self.model)
        changed = next((name for name, value in self._counters.items() if now.get(name) != value), None)
        if changed is not None:
            raise LoopError(
                f"forward changes the number {changed}: {_WHY}, so it would count all of them; keep the number in a "
                "buffer, or start a process for each worker"
            )


def _counters(model: nn.Module) -> dict[str, int]:
    """Integers that modules keep as attributes."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }


def _clipping() -> bool:
    """Whether `torch.nn.utils.clip_grad_norm_` is the caller: it finds no gradient and correctly does nothing."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "clip_grad_norm_" and frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _snapshot(optimizer: Optimizer) -> list[Any]:
    """Everything besides gradients that affects the next step; tensors by identity and version."""
    groups = [{k: _mark(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state = [(id(p), {k: _mark(v) for k, v in kept.items()}) for p, kept in optimizer.state.items()]
    return [groups, state]


def _mark(value: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return (id(value), value._version) if isinstance(value, Tensor) else value
