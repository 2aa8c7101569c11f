from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from weft.ops import SMALL_BYTES, Spec
from weft.profile import Measured
from weft.schedule import Rounds, Schedule, Timetable
from weft.schedule._wave import wave


@final
@dataclass(frozen=True, kw_only=True)
class Sequential(Schedule):
    """Sends everything in one message after backward, without overlap."""

    overlaps: ClassVar[bool] = False

    @property
    def key_bytes(self) -> tuple[int, int]:
        return SMALL_BYTES, super().key_bytes[1]

    def timetable(self, specs: Sequence[Spec], rounds: Rounds, seen: Measured | None = None) -> Timetable:
        return wave([specs], rounds)
