from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy

from weft.ops import Spec
from weft.profile import Cost, Seen
from weft.schedule import Rounds, Schedule, Timetable
from weft.schedule._wave import wave

_WORTH = 0.01
"""The share of a parameter's own time that sharing a start must save."""


@final
@dataclass(frozen=True, kw_only=True)
class MgWfbp(Schedule):
    """Wait-free backpropagation with neighbours merged where that ends the exchange soonest [Shi et al. 2019].

    From measured times: C(0) = 0, C(i) = min over j < i of max(C(j), ready(i)) + T(bytes of j+1..i), where T is the
    sum's time and, for more than one parameter, that of moving them together. Exact for any T that never falls; the
    paper's greedy rule needs a straight line. A parameter whose sum takes a hundred starts is not merged: sharing
    one would win less than a percent of it, and moving it beside others' work costs more than it does on idle cores.
    Until the first steps have shown the times, each parameter goes alone.
    """

    learns: ClassVar[bool] = True
    by_key: ClassVar[bool] = False

    def timetable(self, specs: Sequence[Spec], rounds: Rounds, seen: Seen | None = None) -> Timetable:
        if seen is None:
            return wave([[spec] for spec in specs], rounds)
        sizes = [sum(each.nbytes for each in rounds([spec])) for spec in specs]
        ends = merged([seen.ready_s[spec.name] for spec in specs], sizes, seen.cost, seen.fill_s)
        return wave([specs[start:end] for start, end in zip([0, *ends], ends, strict=False)], rounds)


def merged(ready_s: Sequence[float], sizes: Sequence[int], cost: Cost, fill_s: float = 0.0) -> list[int]:
    """Where each group ends, such that the last is through as early as can be; of equal choices the fewest groups.

    Parameters with a start below `_WORTH` of their own sum's time stay alone.
    """
    count = len(sizes)
    alone = cost.seconds(0) < _WORTH * cost.seconds(sizes)
    large = numpy.concatenate([[0], numpy.cumsum(alone)])
    before = numpy.concatenate([[0.0], numpy.cumsum(sizes, dtype=float)])
    through = numpy.zeros(count + 1)
    groups = numpy.zeros(count + 1, dtype=int)
    last = numpy.zeros(count + 1, dtype=int)
    for i in range(1, count + 1):
        group = before[i] - before[:i]
        several = numpy.arange(i) < i - 1
        moved = fill_s * group * several  # a parameter alone leaves from where it lies
        ends = numpy.maximum(through[:i], ready_s[i - 1]) + cost.seconds(group) + moved
        ends[several & (large[i] > large[:i])] = numpy.inf
        best = min(numpy.flatnonzero(ends <= ends.min() * (1 + 1e-12)), key=lambda j: (groups[j], j))
        through[i], groups[i], last[i] = ends[best], groups[best] + 1, best
    found: list[int] = []
    while count:
        found.insert(0, count)
        count = int(last[count])
    return found
