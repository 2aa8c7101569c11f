"""The profiler: measures how long each part of a step computes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from weft.profile import Profile
from weft.runtime.loop.instruments import InstrumentedRun

_WARMUP = 3


@dataclass(frozen=True, kw_only=True)
class Profiler:
    """Writes the profile of a run to a file: medians of all steps after warm-up, written anew after each."""

    file: Path

    def attach(self, run: InstrumentedRun, model: nn.Module, optimizer: Optimizer) -> None:
        _Measurement(self.file).attach(model, optimizer)


class _Measurement:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.steps: list[tuple[float, list[tuple[str, float]], float]] = []
        """Of each step: seconds of forward, of each parameter's part of backward, of the optimizer."""
        self.arrivals: list[tuple[str, float]] = []
        self.start = self.forward = self.last = self.stepping = 0.0

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        model.register_forward_pre_hook(lambda module, _: self._began() if module.training else None)
        model.register_forward_hook(lambda module, *_: self._forwarded() if module.training else None)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))
        optimizer.register_step_pre_hook(lambda *_: self._stepping())
        optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _began(self) -> None:
        self.start = time.perf_counter()
        self.arrivals = []

    def _forwarded(self) -> None:
        self.forward = self.last = time.perf_counter()

    def _arrived(self, name: str) -> None:
        now = time.perf_counter()
        self.arrivals.append((name, now - self.last))
        self.last = now

    def _stepping(self) -> None:
        self.stepping = time.perf_counter()

    def _stepped(self) -> None:
        self.steps.append((self.forward - self.start, self.arrivals, time.perf_counter() - self.stepping))
        if len(self.steps) > _WARMUP:
            self._write()

    def _write(self) -> None:
        steps = self.steps[_WARMUP:]
        median = statistics.median
        order = [name for name, _ in steps[-1][1]]
        took = {name: median(dict(arrivals).get(name, 0.0) for _, arrivals, _ in steps) for name in order}
        Profile(
            forward_s=median(forward for forward, _, _ in steps),
            backward=tuple(took.items()),
            optimizer_s=median(optimizer for _, _, optimizer in steps),
        ).write(self.file)
