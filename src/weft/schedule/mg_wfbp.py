from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from weft.lazy import numpy
from weft.ops import Spec
from weft.profile import Cost, Measured
from weft.schedule import Rounds, Schedule, Timetable
from weft.schedule._wave import wave

_WORTH = 0.01
"""Tolerance: the fraction of a parameter's time that merging must save, and that fewer buckets may add to the total."""
_MOST_GROUPS = 64
"""If more buckets are needed, the earliest end is taken, with any number of buckets."""


@final
@dataclass(frozen=True, kw_only=True)
class MgWfbp(Schedule):
    """Wait-free backpropagation with adjacent parameters merged to minimize the end time [Shi et al. 2019].

    From measured times: C(0) = 0, C(i) = min over j < i of max(C(j), ready(i)) + T(bytes of j+1..i), where T is the
    all-reduce time plus, for more than one parameter, the time to copy them into a bucket. Exact for any non-decreasing
    T; the paper's greedy rule requires a linear T. Among all solutions within one percent of the earliest end, the one
    with the fewest buckets is taken, since each bucket costs processor time that T does not include. A parameter is not
    merged if its all-reduce takes more than a hundred times the latency: merging would save less than a percent, and
    copying it beside other work costs more than on idle cores. Before calibration each parameter is sent on its own.
    """

    learns: ClassVar[bool] = True
    by_key: ClassVar[bool] = False

    def timetable(self, specs: Sequence[Spec], rounds: Rounds, seen: Measured | None = None) -> Timetable:
        if seen is None:
            return wave([[spec] for spec in specs], rounds)
        sizes = [sum(each.nbytes for each in rounds([spec])) for spec in specs]
        ends = merged([seen.ready_s[spec.name] for spec in specs], sizes, seen.cost, seen.fill_s)
        return wave([specs[start:end] for start, end in zip([0, *ends], ends, strict=False)], rounds)


def merged(ready_s: Sequence[float], sizes: Sequence[int], cost: Cost, fill_s: float = 0.0) -> list[int]:
    """The end index of each bucket: the fewest buckets that end within `_WORTH` of the earliest possible end.

    Parameters whose latency is below `_WORTH` of their all-reduce time are not merged.
    """
    count = len(sizes)
    ready, at = numpy.asarray(ready_s), numpy.arange(count + 1)
    alone = cost.seconds(0) < _WORTH * cost.seconds(sizes)
    large = numpy.concatenate([[0], numpy.cumsum(alone)])
    before = numpy.concatenate([[0.0], numpy.cumsum(sizes, dtype=float)])
    group = numpy.maximum(before[1:, None] - before[None, :-1], 0.0)
    several = at[:-1] < at[1:, None] - 1
    takes = cost.seconds(group) + fill_s * group * several  # a single parameter is not copied
    takes[several & (large[1:, None] > large[:-1])] = numpy.inf
    takes[at[:-1] >= at[1:, None]] = numpy.inf

    soonest, first = numpy.zeros(count + 1), numpy.zeros(count, dtype=int)
    for i in range(count):
        ends = numpy.maximum(soonest[: i + 1], ready[i]) + takes[i, : i + 1]
        first[i] = ends.argmin()
        soonest[i + 1] = ends.min()
    through = numpy.where(at == 0, 0.0, numpy.inf)
    starts: list[Any] = []
    while through[count] > soonest[count] * (1 + _WORTH) and len(starts) < _MOST_GROUPS:
        ends = numpy.maximum(through[:-1], ready[:, None]) + takes
        starts.append(ends.argmin(axis=1))
        through = numpy.concatenate([[numpy.inf], ends.min(axis=1)])
    if through[count] > soonest[count] * (1 + _WORTH):
        starts = [first] * count
    found: list[int] = []
    while count:
        found.insert(0, count)
        count = int(starts.pop()[count - 1])
    return found
