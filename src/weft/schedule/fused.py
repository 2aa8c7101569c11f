from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from weft.ops import Spec
from weft.profile import Seen
from weft.schedule import Rounds, Schedule, Timetable
from weft.schedule._wave import SMALL, wave
from weft.units import Size


@final
@dataclass(frozen=True, kw_only=True)
class Fused(Schedule):
    """Wait-free backpropagation with small parameters merged into buckets [Sergeev & Del Balso 2018]."""

    bucket: Size = Size(25 * 2**20)
    """A bucket closes when it holds this much."""
    first: Size = Size(2**20)
    """The first bucket closes earlier, so that the wire is not idle while backward starts."""

    alone: Size = Size(4 * 2**20)
    """A parameter of this size gains nothing from company: it leaves by itself, straight from its gradient's memory."""

    def __post_init__(self) -> None:
        if self.bucket < 1 or self.first < 1 or self.alone < 1:
            raise ValueError("a bucket holds at least 1B")

    @property
    def key_bytes(self) -> tuple[int, int]:
        return min(self.bucket, SMALL), super().key_bytes[1]

    def timetable(self, specs: Sequence[Spec], rounds: Rounds, seen: Seen | None = None) -> Timetable:
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
