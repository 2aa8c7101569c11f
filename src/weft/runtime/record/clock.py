"""Cheap timestamps: host time on CPU, stream events on CUDA."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from weft.lazy import torch

Stamp = Any
"""A float on CPU, a CUDA event on CUDA; opaque except to `Clock.seconds`."""


@dataclass
class Spans:
    """The intervals of one step's exchange; `wire` by bucket."""

    encode: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    decode: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    wire: list[tuple[int, Stamp, Stamp]] = field(default_factory=list)


class Clock:
    """Takes timestamps in the order of the device's work, and converts them to seconds later."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.start = self.stamp()

    def stamp(self) -> Stamp:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: Stamp) -> float:
        """Seconds since the clock was made; waits for the device if necessary."""
        if not self.cuda:
            return float(stamp - self.start)
        stamp.synchronize()
        return float(self.start.elapsed_time(stamp)) / 1000
