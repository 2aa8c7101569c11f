from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from weft.ops import SMALL_BYTES, Scatter, Spec
from weft.profile import Measured
from weft.schedule import Rounds, Schedule, Slot, Timetable
from weft.schedule._wave import of_one_dtype
from weft.units import Size

_STARTS = 0.05
"""The fraction of a step's longer side, compute or communication, that may be spent on latency."""


@final
@dataclass(frozen=True, kw_only=True)
class Priority(Schedule):
    """Cuts parameters into parts and sends the front layers' parts first, since the next forward needs them first.

    Each parameter is updated when its gradient has arrived, and the next forward starts before the last part has
    arrived [Jayarajan et al. 2019, Peng et al. 2019]. Bound: max(compute, wire); while the wire is the longer of the
    two, the time from the last layer's update to its next gradient is added. The order is computed in advance from
    calibration, identically on every rank.
    """

    learns: ClassVar[bool] = True
    defers: ClassVar[bool] = True

    partition: Size = Size(4 * 2**20)
    """The largest part; smaller parts let urgent ones overtake sooner."""
    credit: Size = Size(16 * 2**20)
    """Bytes on the wire at once: enough to keep it busy, few enough to let urgent parts overtake."""
    least: Size = Size(SMALL_BYTES)
    """Adjacent parameters smaller than this share a bucket, so that latency is paid once. The default grows where
    calibration shows that latency would take too long; any other value is used as given."""

    def __post_init__(self) -> None:
        if self.partition < 1 or self.credit < 1 or self.least < 1:
            raise ValueError("partition, credit and least must be at least 1B")

    @property
    def key_bytes(self) -> tuple[int, int]:
        return self.least, self.partition

    def timetable(self, specs: Sequence[Spec], rounds: Rounds, seen: Measured | None = None) -> Timetable:
        groups = _groups(specs, self._least(specs, rounds, seen))
        buckets = [bucket for group in groups for bucket in of_one_dtype(group)]
        turns = [self._turns(number, bucket, rounds) for number, bucket in enumerate(buckets)]
        if seen is None:
            order = [slot for mine in turns for turn in mine for slot in turn]
        else:
            ready = [max(seen.ready_s[spec.name] for spec in bucket) for bucket in buckets]
            at_once = max(1, self.credit // self.partition)
            busy_s = float(seen.cost.seconds(self.partition * at_once)) / at_once  # parts in flight share the latency
            order = front_first(turns, ready, busy_s / self.partition)
        return Timetable(tuple(buckets), tuple(order), credit=self.credit)

    def _least(self, specs: Sequence[Spec], rounds: Rounds, seen: Measured | None) -> int:
        """`least`, doubled until all latencies together take a small fraction of backward or of the wire's time."""
        least = int(self.least)
        if seen is None or least != SMALL_BYTES:
            return least
        wire_s = float(seen.cost.seconds(sum(each.nbytes for each in rounds(specs))))
        allowed_s = _STARTS * max([wire_s, *seen.ready_s.values()])
        while least < self.partition and len(_groups(specs, least)) * float(seen.cost.seconds(0)) > allowed_s:
            least *= 2
        return least

    def _turns(self, number: int, bucket: Sequence[Spec], rounds: Rounds) -> list[list[Slot]]:
        """The rounds of a bucket, each cut into parts."""
        turns = []
        for turn, each in enumerate(rounds(bucket)):
            parts = 1 if each.op is Scatter else max(1, -(-each.nbytes // self.partition))
            turns.append([Slot(number, turn, part, parts, -(-each.nbytes // parts)) for part in range(parts)])
        return turns


def _groups(specs: Sequence[Spec], least: int) -> list[list[Spec]]:
    """Merge adjacent parameters that are smaller than `least`."""
    groups: list[list[Spec]] = []
    free_bytes = 0
    for spec in specs:
        if free_bytes > 0 and spec.nbytes < least:
            groups[-1].append(spec)
        else:
            groups.append([spec])
            free_bytes = least if spec.nbytes < least else 0
        free_bytes -= spec.nbytes
    return groups


def front_first(turns: Sequence[Sequence[Sequence[Slot]]], ready_s: Sequence[float], byte_s: float) -> list[Slot]:
    """Simulate one wire that carries one part at a time: always the ready part that the next forward needs first.

    `turns[b][r]` are the parts of round r of bucket b. Backward finishes buckets in ascending order, so forward needs
    them in descending order.
    """
    order: list[Slot] = []
    coming = sorted((at, bucket) for bucket, at in enumerate(ready_s))
    able: list[tuple[int, int, int, Slot]] = []
    now, arrived = 0.0, 0

    def enter(bucket: int, turn: int) -> None:
        for slot in turns[bucket][turn] if turn < len(turns[bucket]) else ():
            heapq.heappush(able, (-bucket, turn, slot.part, slot))

    while arrived < len(coming) or able:
        while arrived < len(coming) and (coming[arrived][0] <= now or not able):
            now = max(now, coming[arrived][0])
            enter(coming[arrived][1], 0)
            arrived += 1
        if able:
            _, turn, part, slot = heapq.heappop(able)
            order.append(slot)
            now += slot.nbytes * byte_s
            if part == slot.parts - 1:
                enter(slot.bucket, turn + 1)
    return order
