from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from weft.ops import SMALL_BYTES, Spec
from weft.profile import Measured
from weft.schedule import Rounds, Schedule, Timetable
from weft.schedule._wave import wave
from weft.units import Size


@final
@dataclass(frozen=True, kw_only=True)
class Fused(Schedule):
    """Wait-free backpropagation with small parameters fused into buckets [Sergeev & Del Balso 2018]."""

    bucket: Size = Size(25 * 2**20)
    """The size at which a bucket is closed."""
    first: Size = Size(2**20)
    """The size at which the first bucket is closed; smaller, so that the wire is not idle at the start of backward."""

    alone: Size = Size(4 * 2**20)
    """A parameter of this size or larger has a bucket of its own and is sent from its gradient's memory, uncopied."""

    def __post_init__(self) -> None:
        if self.bucket < 1 or self.first < 1 or self.alone < 1:
            raise ValueError("bucket, first and alone must be at least 1B")

    @property
    def key_bytes(self) -> tuple[int, int]:
        return min(self.bucket, SMALL_BYTES), super().key_bytes[1]

    def timetable(self, specs: Sequence[Spec], rounds: Rounds, seen: Measured | None = None) -> Timetable:
        closed: list[list[Spec]] = []
        filling: list[Spec] = []
        limit = min(self.first, self.bucket)
        for spec in specs:
            if spec.nbytes >= self.alone:
                closed.append([spec])
                continue
            filling.append(spec)
            if sum(each.nbytes for each in filling) >= limit:
                closed.append(filling)
                filling, limit = [], self.bucket
        return wave([*closed, filling] if filling else closed, rounds)
