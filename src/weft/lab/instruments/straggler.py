"""A straggler: real computing that takes several times as long."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

from weft.errors import SpellingError
from weft.runtime.loop.instruments import InstrumentedRun

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_MIN_SLEEP_S = 0.0005
"""A shorter sleep is mostly the cost of waking up; it is saved up, or left out."""


@dataclass(frozen=True)
class Slow:
    """Computing takes `factor` times as long, in a `share` of the steps."""

    factor: float = 1.0
    share: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Slow:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)x(?:@(\d+(?:\.\d+)?)%)?", text.strip())
        if match is None or float(match[1]) < 1 or float(match[2] or 100) > 100:
            raise SpellingError(f"'{text}' is not a slow-down; write 4x, or 4x@10% for a tenth of the steps")
        return cls(float(match[1]), float(match[2] or 100) / 100)

    def __str__(self) -> str:
        return f"{self.factor:g}x" + (f"@{self.share * 100:g}%" if self.share < 1 else "")

    def at(self, seed: int, rank: int, step: int) -> float:
        """The factor of one step: a function of the run's seed, the worker and the step alone."""
        if self.share < 1.0 and random.Random(f"{seed}/{rank}/{step}").random() >= self.share:
            return 1.0
        return self.factor

    def of(self, run: InstrumentedRun) -> Callable[[], float]:
        """The factor of a run's present step."""
        return lambda: self.at(run.seed, run.world.process, run.step)


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """Stretches real computing by idling after each part of it, so that gradients arrive late one by one."""

    slow: Slow

    def attach(self, run: InstrumentedRun, model: nn.Module, optimizer: Optimizer) -> None:
        if self.slow.factor > 1:
            _Stretch(self.slow.of(run)).attach(model, optimizer)


class _Stretch:
    """After each part of a step, idles for (factor - 1) times as long as the part took."""

    def __init__(self, factor: Callable[[], float]) -> None:
        self.factor, self.now, self.backlog_s = factor, 1.0, 0.0
        self.mark = time.perf_counter()

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        model.register_forward_pre_hook(lambda *_: self._start())
        model.register_forward_hook(lambda *_: self._stretch())
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda _: self._stretch())
        replace_step(optimizer, self._step)

    def _start(self) -> None:
        self.now = self.factor()
        self.mark = time.perf_counter()

    def _stretch(self) -> None:
        self.backlog_s += (time.perf_counter() - self.mark) * (self.now - 1)
        if self.backlog_s > _MIN_SLEEP_S:
            began = time.perf_counter()
            time.sleep(self.backlog_s)
            self.backlog_s -= time.perf_counter() - began
        self.mark = time.perf_counter()

    def _step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = step()
        sleep_until(time.perf_counter() + (time.perf_counter() - began) * (self.now - 1))
        return result


def replace_step(optimizer: Optimizer, act: Callable[[Optimizer, Callable[[], Any]], Any]) -> None:
    """Let `act` take the optimizer's step. It is called with the optimizer and its original step.

    A copy of the optimizer with some of its parameters inherits the replacement; `act` is then called with the copy.
    """
    step = optimizer.step
    func: Callable[..., Any] | None = step.__func__ if isinstance(step, MethodType) else None

    def replaced(self: Optimizer, closure: Any = None) -> Any:
        return act(self, (lambda: func(self)) if func else step)

    replaced.__dict__.update(vars(func or step))  # schedulers mark a step that they have wrapped
    optimizer.step = MethodType(replaced, optimizer)  # type: ignore[method-assign]


def sleep_until(moment: float) -> None:
    """Sleep until `time.perf_counter()` is at `moment`."""
    left = moment - time.perf_counter()
    if left > _MIN_SLEEP_S:
        time.sleep(left)
