"""What a step costs: its computing, layer by layer, and an exchange by its size; measured, or worked out from layers.

Schedules group by them, sleeping compute stands in for them, the planner predicts from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy

from weft.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Seconds of one step on one worker."""

    forward_s: float
    """Divided among the layers as backward is."""
    backward: tuple[tuple[str, float], ...]
    """Parameters in the order in which backward finishes them, with the time since the one before (the first one's:
    since forward ended, with the loss)."""
    optimizer_s: float = 0.0

    @property
    def backward_s(self) -> float:
        return sum(seconds for _, seconds in self.backward)

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s

    def scaled(self, factor: float) -> Profile:
        """The same step, so many times slower."""
        return Profile(
            forward_s=self.forward_s * factor,
            backward=tuple((name, seconds * factor) for name, seconds in self.backward),
            optimizer_s=self.optimizer_s * factor,
        )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Profile:
        return _read(cls.of, path, "give a profile, with forward_s and backward")

    @classmethod
    def of(cls, table: dict[str, Any]) -> Profile:
        backward = tuple((str(name), float(seconds)) for name, seconds in table["backward"])
        return cls(
            forward_s=float(table["forward_s"]), backward=backward, optimizer_s=float(table.get("optimizer_s", 0.0))
        )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds that a sum of so many bytes takes, all workers together: measured points and straight lines through them.

    Never falling, whatever was measured; beyond the largest size it goes on as between the last two.
    """

    points: tuple[tuple[int, float], ...]
    """Sizes in bytes, ascending, with their seconds."""

    def seconds(self, nbytes: Any) -> Any:
        """For one size, or an array of them."""
        sizes = numpy.array([size for size, _ in self.points], dtype=float)
        times = numpy.maximum.accumulate([seconds for _, seconds in self.points])
        inside = numpy.interp(nbytes, sizes, times)
        if len(sizes) == 1:
            return inside
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        return inside + slope * numpy.maximum(0.0, numpy.asarray(nbytes, dtype=float) - sizes[-1])


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the first steps have shown about a model and its links, the same on every worker."""

    ready_s: dict[str, float]
    """When backward has finished each parameter, since its own beginning; in the order of finishing."""
    cost: Cost
    fill_s: float = 0.0
    """Seconds for each byte that is moved next to others, into a bucket; a parameter that leaves alone is not moved."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Measured:
        return _read(cls.of, path, "remove it, and it will be measured again")

    @classmethod
    def of(cls, table: dict[str, Any]) -> Measured:
        points = tuple((int(size), float(seconds)) for size, seconds in table["cost"]["points"])
        ready_s = {str(name): float(seconds) for name, seconds in table["ready_s"].items()}
        return cls(ready_s=ready_s, cost=Cost(points=points), fill_s=float(table["fill_s"]))


T = TypeVar("T")


def _read(of: Callable[[Any], T], path: Path, remedy: str) -> T:
    """What a JSON file holds, or one sentence about it."""
    try:
        return of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; {remedy}") from None
