"""The order of rounds that all present schedules share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.ops import Spec
from weft.schedule import Slot, Timetable


def wave(groups: Iterable[Sequence[Spec]], rounds: int) -> Timetable:
    """Buckets start one after another; before each start, those under way take their next round.

    A bucket has one dtype, so mixed groups are divided.
    """
    buckets: list[tuple[Spec, ...]] = []
    for group in groups:
        for dtype in dict.fromkeys(spec.dtype for spec in group):
            buckets.append(tuple(spec for spec in group if spec.dtype == dtype))
    slots = [
        Slot(bucket, turn - bucket)
        for turn in range(len(buckets) + rounds - 1)
        for bucket in range(len(buckets))
        if 0 <= turn - bucket < rounds
    ]
    return Timetable(tuple(buckets), tuple(slots))
