"""The user's optimizer and followers, patched on their instances.

`step` takes effect when the gradients of all logical workers of this process are complete; so do schedulers, scalers
and averages that were passed along. `zero_grad` goes through the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.errors import UserError
from weft.runtime.loop import refusals
from weft.runtime.modes import Mode

FOLLOWED = ("step", "update", "unscale_", "update_parameters", "zero_grad")


class EvaluatedOnce:
    """A closure whose backward comes before the step. The optimizer gets its loss, and may not evaluate it again."""

    def __init__(self, closure: Callable[[], Any]) -> None:
        with torch.enable_grad():
            self.loss, self._taken = closure(), False

    def __call__(self) -> Any:
        if self._taken:
            raise refusals.closure()
        self._taken = True
        return self.loss


@contextmanager
def _scaled(optimizer: Any) -> Iterator[None]:
    """Mark the gradients as looked at by a scaler, as it does itself where the optimizer checks them: `has_scaler`."""
    optimizer.found_inf = True
    try:
        yield
    finally:
        del optimizer.found_inf


class PatchedOptimizer:
    """One optimizer of the user's and the objects that follow it."""

    def __init__(self, optimizer: Optimizer, followers: Sequence[Any], mode: Mode, *, own_data: bool) -> None:
        self._own_data = own_data
        self.optimizer, self.mode, self.passes, self.phases = optimizer, mode, mode.ctx.passes, mode.ctx.phases
        self._step, self._zero_grad = optimizer.step, optimizer.zero_grad
        self._called = False
        self._scheduled = any(isinstance(follower, LRScheduler) for follower in followers)
        self._patch()
        if self.passes.count > 1:
            for follower in followers:
                self._follow(follower)
        for follower in followers if mode.steps_each_pass else ():
            if isinstance(follower, GradScaler):
                self._count_skipped_steps(follower)
        self._check_scheduler()

    def _patch(self) -> None:
        optimizer = self.optimizer

        def weft_step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self.step(closure)

        def weft_zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
            self.mode.zero_grad(lambda: self._zero_grad(set_to_none), set_to_none=set_to_none)

        if hasattr(self._step, "_wrapped_by_lr_sched"):
            weft_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.register_state_dict_pre_hook(lambda _: self.mode.before_state_dict())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.mode.before_load_state_dict())
        # bound methods, as a scheduler that is made later expects them
        optimizer.step = MethodType(weft_step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(weft_zero_grad, optimizer)  # type: ignore[method-assign]

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """`optimizer.step()` as the loop calls it."""
        self._called = True
        return self._take(closure, self._step)

    def _take(self, closure: Callable[[], Any] | None, step: Callable[..., Any]) -> Any:
        passes = self.passes
        if closure is not None and not self.mode.accepts_closure:
            closure = EvaluatedOnce(closure)
        if not (passes.dealt or self._own_data):
            raise refusals.no_batch()
        self._check_scheduler()
        self.mode.check_step()
        passes.step_called = True

        def update() -> Any:
            return step(closure) if closure is not None else step()

        if not passes.complete:
            result = self.mode.pass_stepped(update)
            return closure.loss if isinstance(closure, EvaluatedOnce) else result
        result = self.mode.step(update)
        samples = passes.samples
        passes.stepped()
        self.phases.step_ended(passes.step, samples)
        return closure.loss if isinstance(closure, EvaluatedOnce) else result

    def _count_skipped_steps(self, scaler: GradScaler) -> None:
        """Count a step that a scaler skips for one worker alone: all workers take the same number of steps."""
        scale_step = scaler.step

        def weft_scaler_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._called = False
            result = scale_step(optimizer, *args, **kwargs)
            if optimizer is self.optimizer and not self._called:
                with _scaled(optimizer):
                    self._take(None, lambda: None)
            return result

        scaler.step = weft_scaler_step  # type: ignore[method-assign]

    def _follow(self, follower: Any) -> None:
        """Let a scheduler, a scaler or an average act only when the optimizer does."""
        for name in FOLLOWED:
            act = getattr(follower, name, None)
            if act is not None:
                setattr(follower, name, self._when_complete(act))

    def _when_complete(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def weft_act(*args: Any, **kwargs: Any) -> Any:
            self.passes.step_called = True
            return act(*args, **kwargs) if self.passes.complete else None

        return weft_act

    def _check_scheduler(self) -> None:
        """Refuse a scheduler that was not passed along, where it would step once for each logical worker."""
        if self.passes.count > 1 and hasattr(self.optimizer.step, "_wrapped_by_lr_sched") and not self._scheduled:
            raise UserError(
                "a scheduler follows the optimizer, and this process carries several workers; make it first and pass "
                "it along: model, optimizer, scheduler = run.distribute(model, optimizer, scheduler)"
            )
