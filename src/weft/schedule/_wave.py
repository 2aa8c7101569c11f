"""The order of rounds for schedules without priorities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.ops import Spec
from weft.schedule import Rounds, Slot, Timetable


def wave(groups: Iterable[Sequence[Spec]], rounds: Rounds) -> Timetable:
    """Buckets start one after another. Before each start, every bucket in progress takes its next round."""
    buckets = [bucket for group in groups for bucket in of_one_dtype(group)]
    sizes = [rounds(bucket) for bucket in buckets]
    longest = max((len(each) for each in sizes), default=0)
    slots = [
        Slot(bucket, turn - bucket, nbytes=sizes[bucket][turn - bucket].nbytes)
        for turn in range(len(buckets) + longest - 1)
        for bucket in range(len(buckets))
        if 0 <= turn - bucket < len(sizes[bucket])
    ]
    return Timetable(tuple(buckets), tuple(slots))


def of_one_dtype(group: Sequence[Spec]) -> list[tuple[Spec, ...]]:
    """Divide a group by dtype, since a bucket has one dtype."""
    return [tuple(spec for spec in group if spec.dtype == dtype) for dtype in dict.fromkeys(s.dtype for s in group)]
