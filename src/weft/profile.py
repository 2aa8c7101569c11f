"""The cost of a step: compute time by layer, and exchange time by size; measured, or estimated from the layers.

Schedules form buckets from it, emulated compute sleeps for it, and the planner predicts from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import UserError
from weft.lazy import numpy


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Compute time of one step on one worker, in seconds."""

    forward_s: float
    """Divided among the layers in proportion to their backward time."""
    backward: tuple[tuple[str, float], ...]
    """Parameters in the order in which backward finishes them, each with the time since the previous one. The first
    one's time starts at the end of forward and includes the loss."""
    optimizer_s: float = 0.0

    @property
    def backward_s(self) -> float:
        return sum(seconds for _, seconds in self.backward)

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s

    def scaled(self, factor: float) -> Profile:
        """The same step, slower by this factor."""
        return Profile(
            forward_s=self.forward_s * factor,
            backward=tuple((name, seconds * factor) for name, seconds in self.backward),
            optimizer_s=self.optimizer_s * factor,
        )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Profile:
        return _read(cls.of, path, "give a profile with forward_s and backward")

    @classmethod
    def of(cls, table: dict[str, Any]) -> Profile:
        backward = tuple((str(name), float(seconds)) for name, seconds in table["backward"])
        return cls(
            forward_s=float(table["forward_s"]), backward=backward, optimizer_s=float(table.get("optimizer_s", 0.0))
        )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Duration of an all-reduce by payload size, over all workers: linear interpolation between measured points.

    It never decreases with size. Beyond the largest measured size it is extrapolated from the last two points.
    """

    points: tuple[tuple[int, float], ...]
    """(bytes, seconds), in ascending order of bytes."""

    def seconds(self, nbytes: Any) -> Any:
        """The duration for one size, or for an array of sizes."""
        sizes = numpy.array([size for size, _ in self.points], dtype=float)
        times = numpy.maximum.accumulate([seconds for _, seconds in self.points])
        inside = numpy.interp(nbytes, sizes, times)
        if len(sizes) == 1:
            return inside
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        return inside + slope * numpy.maximum(0.0, numpy.asarray(nbytes, dtype=float) - sizes[-1])


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of the first steps about a model and its links, identical on every worker."""

    ready_s: dict[str, float]
    """When backward finishes each parameter, counted from the start of backward; in the order of finishing."""
    cost: Cost
    fill_s: float = 0.0
    """Seconds per byte for copying a gradient into a bucket. A parameter with a bucket of its own is not copied."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Measured:
        return _read(cls.of, path, "remove the file, and it will be measured again")

    @classmethod
    def of(cls, table: dict[str, Any]) -> Measured:
        points = tuple((int(size), float(seconds)) for size, seconds in table["cost"]["points"])
        ready_s = {str(name): float(seconds) for name, seconds in table["ready_s"].items()}
        return cls(ready_s=ready_s, cost=Cost(points=points), fill_s=float(table["fill_s"]))


T = TypeVar("T")


def _read(of: Callable[[Any], T], path: Path, remedy: str) -> T:
    """The content of a JSON file. Raises UserError with one sentence if it cannot be read."""
    try:
        return of(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; {remedy}") from None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; {remedy}") from None
