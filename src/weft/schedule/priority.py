from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from weft.ops import Scatter, Spec
from weft.profile import Measured
from weft.schedule import Rounds, Schedule, Slot, Timetable
from weft.schedule._wave import of_one_dtype
from weft.units import Size

_LEAST = 64 * 2**10
_STARTS = 0.05
"""The share of a step's longer side, computing or sending, that may be spent on starting exchanges."""


@final
@dataclass(frozen=True, kw_only=True)
class Priority(Schedule):
    """Parameters are cut into parts, and the front layers' parts go first, since the next forward needs them first.

    Each parameter is updated when its gradient has arrived, and the next forward starts before the last part is
    through [Jayarajan et al. 2019, Peng et al. 2019]. Bound: max(computing, wire), and while the wire is the longer,
    the way from the last layer's update to its next gradient on top. The order is worked out ahead, on every rank
    alike, from what the first steps have shown.
    """

    learns: ClassVar[bool] = True
    defers: ClassVar[bool] = True

    partition: Size = Size(4 * 2**20)
    """Payloads are cut into parts of at most this size, so that none holds up a more urgent one for long."""
    credit: Size = Size(16 * 2**20)
    """So much may be on the wire at once: enough to keep it busy, little enough to let urgent parts through."""
    least: Size = Size(_LEAST)
    """Neighbours that are smaller than this leave together, so that they do not each pay the latency. The default grows
    where the first steps show that starts would take long; any other value stays."""

    def __post_init__(self) -> None:
        if self.partition < 1 or self.credit < 1 or self.least < 1:
            raise ValueError("partition, credit and least are at least 1B")

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
            busy_s = float(seen.cost.seconds(self.partition * at_once)) / at_once  # parts on the wire share its latency
            order = front_first(turns, ready, busy_s / self.partition)
        return Timetable(tuple(buckets), tuple(order), credit=self.credit)

    def _least(self, specs: Sequence[Spec], rounds: Rounds, seen: Measured | None) -> int:
        """`least`, or more: so much that all starts together take a small share of backward or of the wire's time."""
        least = int(self.least)
        if seen is None or least != _LEAST:
            return least
        wire_s = float(seen.cost.seconds(sum(each.nbytes for each in rounds(specs))))
        allowed_s = _STARTS * max([wire_s, *seen.ready_s.values()])
        while least < self.partition and len(_groups(specs, least)) * float(seen.cost.seconds(0)) > allowed_s:
            least *= 2
        return least

    def _turns(self, number: int, bucket: Sequence[Spec], rounds: Rounds) -> list[list[Slot]]:
        """A bucket's rounds, each cut into parts."""
        turns = []
        for turn, each in enumerate(rounds(bucket)):
            parts = 1 if each.op is Scatter else max(1, -(-each.nbytes // self.partition))
            turns.append([Slot(number, turn, part, parts, -(-each.nbytes // parts)) for part in range(parts)])
        return turns


def _groups(specs: Sequence[Spec], least: int) -> list[list[Spec]]:
    """Neighbours that are smaller than `least`, together."""
    groups: list[list[Spec]] = []
    room = 0
    for spec in specs:
        if room > 0 and spec.nbytes < least:
            groups[-1].append(spec)
        else:
            groups.append([spec])
            room = least if spec.nbytes < least else 0
        room -= spec.nbytes
    return groups


def front_first(turns: Sequence[Sequence[Sequence[Slot]]], ready_s: Sequence[float], byte_s: float) -> list[Slot]:
    """One wire, one part at a time: of what is ready, the part that the next forward needs first.

    `turns[b][r]` are the parts of bucket b's round r; backward finishes buckets in the order of their numbers, so that
    forward needs them in the opposite one.
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
