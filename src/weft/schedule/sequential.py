from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from weft.ops import Spec
from weft.profile import Seen
from weft.schedule import Rounds, Schedule, Timetable
from weft.schedule._wave import wave


@final
@dataclass(frozen=True, kw_only=True)
class Sequential(Schedule):
    """Everything in one message after backward; nothing overlaps."""

    def timetable(self, specs: Sequence[Spec], rounds: Rounds, seen: Seen | None = None) -> Timetable:
        return wave([specs], rounds)
