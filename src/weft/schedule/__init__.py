"""IN WHICH ORDER does it leave?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from weft.axis import Answer
from weft.ops import Round, Spec
from weft.profile import Measured

Rounds = Callable[[Sequence[Spec]], tuple[Round, ...]]
"""What exchanging a bucket of these parameters takes, as sizes."""


@dataclass(frozen=True)
class Slot:
    """A turn on the wire: of this bucket's round, one of so many parts."""

    bucket: int
    round: int
    part: int = 0
    parts: int = 1
    nbytes: int = 0
    """The part's share of one worker's payload; counts against the timetable's credit."""


@dataclass(frozen=True)
class Timetable:
    """Which parameters leave together, and one order of turns: the same on every rank, fixed ahead."""

    buckets: tuple[tuple[Spec, ...], ...]
    slots: tuple[Slot, ...]
    credit: float = float("inf")
    """Bytes that may be on the wire at once; a single part always may."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Answer, ABC):
    """Makes a timetable of the parameters, given in the order in which backward finishes them."""

    axis: ClassVar[str] = "schedule"
    learns: ClassVar[bool] = False
    """Whether its timetable follows from what the first steps show."""
    defers: ClassVar[bool] = False
    """Whether each parameter is updated when its gradient arrives, while the next forward already runs."""
    overlaps: ClassVar[bool] = True
    """Whether gradients leave while backward still runs."""
    by_key: ClassVar[bool] = True
    """Whether it works with servers, where parameters come and go by themselves, in no order that all share."""

    @property
    def key_bytes(self) -> tuple[int, int]:
        """With servers: parameters smaller than the first travel together, what is larger than the second is cut."""
        return 1, 4 * 2**20

    @abstractmethod
    def timetable(self, specs: Sequence[Spec], rounds: Rounds, seen: Measured | None = None) -> Timetable:
        """A round waits for the one before it in its bucket. `seen` is None until the first steps are over."""
