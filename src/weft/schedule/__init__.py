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
"""The collectives that a bucket of these parameters needs, as sizes."""


@dataclass(frozen=True)
class Slot:
    """One part of one round of a bucket, in the order in which parts are issued."""

    bucket: int
    round: int
    part: int = 0
    parts: int = 1
    nbytes: int = 0
    """The part's share of one worker's payload; counted against the timetable's credit."""


@dataclass(frozen=True)
class Timetable:
    """The buckets, and one order of slots: fixed in advance and identical on every rank."""

    buckets: tuple[tuple[Spec, ...], ...]
    slots: tuple[Slot, ...]
    credit: float = float("inf")
    """Bytes that may be on the wire at once; a single part is always allowed."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Answer, ABC):
    """Makes a timetable for the parameters, given in the order in which backward finishes them."""

    axis: ClassVar[str] = "schedule"
    learns: ClassVar[bool] = False
    """Whether its timetable depends on measurements of the first steps."""
    defers: ClassVar[bool] = False
    """Whether each parameter is updated when its gradient arrives, while the next forward already runs."""
    overlaps: ClassVar[bool] = True
    """Whether gradients are sent while backward still runs."""
    by_key: ClassVar[bool] = True
    """Whether it works with servers, where parameters are pushed and pulled individually, without a shared order."""

    @property
    def key_bytes(self) -> tuple[int, int]:
        """With servers: parameters below the first size share a message; those above the second are cut."""
        return 1, 4 * 2**20

    @abstractmethod
    def timetable(self, specs: Sequence[Spec], rounds: Rounds, seen: Measured | None = None) -> Timetable:
        """Each round waits for the previous round of its bucket. `seen` is None until calibration is complete."""
