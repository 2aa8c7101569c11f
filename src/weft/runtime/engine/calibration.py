"""Calibration in the first steps: when backward finishes each parameter, and the all-reduce time by size.

It is measured once, agreed on by all processes, stored in the run folder, and read from there when a run resumes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from weft.ops import Sum
from weft.profile import Cost, Measured
from weft.runtime.record.clock import Clock, Stamp
from weft.runtime.record.files import writing
from weft.transport.collective import Processes

STEPS = 3
"""Steps that are measured, after the first one, in which the order of parameters is a guess."""
_SIZES = [4**k * 1024 for k in range(8)]
_TRIES = 3
_LONG_S = 0.2
_FILE = "seen.json"


class Calibration:
    """Measures the first steps of one process."""

    def __init__(self, transport: Processes, clock: Clock, names: Sequence[str], folder: Path | None) -> None:
        self.transport, self.clock, self.names, self.folder = transport, clock, names, folder
        self._steps: list[list[tuple[int, Stamp]]] = [[]]

    def arrived(self, index: int) -> None:
        """Backward has finished a parameter."""
        self._steps[-1].append((index, self.clock.stamp()))

    def step_ended(self) -> bool:
        """Returns whether enough steps are measured."""
        self._steps.append([])
        return len(self._steps) - 1 > STEPS

    def _watched(self) -> list[list[tuple[int, Stamp]]]:
        return self._steps[-1 - max(1, STEPS) : -1]

    def learn(self, order: Sequence[int], device: torch.device) -> Measured:
        """The agreed measurements; a collective call."""
        times: dict[int, list[float]] = {index: [] for index in order}
        for step in self._watched():
            at = {index: self.clock.seconds(stamp) for index, stamp in step}
            first, last = min(at.values(), default=0.0), max(at.values(), default=0.0)
            for index in order:  # a parameter that backward did not reach is known when backward ends
                times[index].append(at.get(index, last) - first)
        mine = [round(statistics.median(times[index]) * 1e9) for index in order]
        everyone = numpy.mean(self.transport.tell(mine), axis=0) / 1e9
        ready = numpy.maximum.accumulate(everyone)
        seen = Measured(
            ready_s={self.names[index]: float(at) for index, at in zip(order, ready, strict=True)},
            cost=self._cost(device),
            fill_s=self._fill_s(device),
        )
        if self.folder is not None and self.transport.layout.process == 0:
            with writing(self.folder):
                seen.write(self.folder / _FILE)
        return seen

    def _cost(self, device: torch.device) -> Cost:
        """All-reduce times from small to large sizes, until one takes long; the slowest process counts."""
        points = []
        for size in _SIZES:
            took = [self._one_sum(size, device) for _ in range(_TRIES + 1)][1:]
            slowest = max(row[0] for row in self.transport.tell([round(statistics.median(took) * 1e9)])) / 1e9
            points.append((size, slowest))
            if slowest > _LONG_S:
                break
        return Cost(points=tuple(points))

    def _one_sum(self, size: int, device: torch.device) -> float:
        carried = self.transport.layout.carried()
        ops = [Sum(torch.zeros(size // 4, device=device)) for _ in carried]
        began = _now(device)
        for under_way in self.transport.perform(ops, size):
            under_way.wait()
        return _now(device) - began

    def _fill_s(self, device: torch.device) -> float:
        """The time to copy one byte into a bucket; the slowest process counts."""
        size = _SIZES[-1] // 4
        source, bucket = torch.zeros(size // 4, device=device), torch.zeros(size // 4, device=device)
        took = []
        for _ in range(_TRIES):
            began = _now(device)
            torch.mul(source, 0.5, out=bucket)
            took.append(_now(device) - began)
        everyone = self.transport.tell([round(statistics.median(took) * 1e9)])
        return float(max(row[0] for row in everyone) / 1e9 / size)

    def recall(self) -> Measured | None:
        """The measurements of an earlier part of this run, as process 0 finds them in the run folder."""
        found: dict[str, Any] = {"names": [], "numbers": []}
        if self.folder is not None and self.transport.layout.process == 0 and (self.folder / _FILE).exists():
            seen = Measured.read(self.folder / _FILE)
            index = {name: i for i, name in enumerate(self.names)}
            if set(seen.ready_s) == set(index):
                found["names"] = [index[name] for name in seen.ready_s]
                found["numbers"] = [round(at * 1e9) for at in seen.ready_s.values()]
                found["numbers"].append(round(seen.fill_s * 1e18))
                found["numbers"] += [number for size, at in seen.cost.points for number in (size, round(at * 1e9))]
        size, length = self.transport.tell([len(found["names"]), len(found["numbers"])])[0]
        if size == 0:
            return None
        row = self.transport.tell((found["names"] + found["numbers"]) or [0] * (size + length))[0]
        order, ready, fill, points = row[:size], row[size : 2 * size], row[2 * size], row[2 * size + 1 :]
        return Measured(
            fill_s=fill / 1e18,
            ready_s={self.names[i]: at / 1e9 for i, at in zip(order, ready, strict=True)},
            cost=Cost(points=tuple((a, b / 1e9) for a, b in zip(points[::2], points[1::2], strict=True))),
        )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
