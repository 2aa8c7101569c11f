"""IN WHICH ORDER does it leave?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from weft.axis import Answer
from weft.ops import Spec


@dataclass(frozen=True)
class Slot:
    """A turn on the wire: this bucket's next round."""

    bucket: int
    round: int


@dataclass(frozen=True)
class Timetable:
    """Which parameters leave together, and one order of rounds: the same on every rank, fixed ahead."""

    buckets: tuple[tuple[Spec, ...], ...]
    slots: tuple[Slot, ...]


@dataclass(frozen=True, kw_only=True)
class Schedule(Answer, ABC):
    """Makes a timetable of the parameters, given in the order in which backward finishes them."""

    axis: ClassVar[str] = "schedule"

    @abstractmethod
    def timetable(self, specs: Sequence[Spec], rounds: int) -> Timetable:
        """A bucket's exchange takes `rounds` turns; a round waits for the one before it."""
