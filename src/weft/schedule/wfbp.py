from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from weft.ops import Spec
from weft.profile import Measured
from weft.schedule import Rounds, Schedule, Timetable
from weft.schedule._wave import wave


@final
@dataclass(frozen=True, kw_only=True)
class Wfbp(Schedule):
    """Wait-free backpropagation: sends each parameter as soon as backward has finished it [Zhang et al. 2017].

    A transfer starts at max(end of the previous one, its gradient's time). Each small parameter pays the full latency.
    """

    def timetable(self, specs: Sequence[Spec], rounds: Rounds, seen: Measured | None = None) -> Timetable:
        return wave([[spec] for spec in specs], rounds)
