"""The engine's book in virtual time: whatever the delays, no layer starts before its parameters are updated."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence

import pytest

from weft.ops import Round, Spec, Sum
from weft.profile import Cost, Measured
from weft.runtime.engine.issue_order import IssueOrder
from weft.schedule import Slot, Timetable
from weft.schedule.priority import Priority

LAYERS = 7


def timetable(draw: random.Random, rounds: int) -> Timetable:
    specs = [Spec(f"p{at}", (draw.randint(1, 3000),)) for at in range(LAYERS)]
    ready = itertools.accumulate(draw.random() for _ in specs)
    seen = Measured(
        ready_s={s.name: at for s, at in zip(specs, ready, strict=True)}, cost=Cost(points=((0, 0.1), (999, 0.2)))
    )

    def sizes(bucket: Sequence[Spec]) -> tuple[Round, ...]:
        return tuple(Round(Sum, sum(spec.nbytes for spec in bucket)) for _ in range(rounds))

    return Priority(partition=1000, credit=3000, least=1).timetable(specs, sizes, seen)  # type: ignore[arg-type]


def step(table: Timetable, draw: random.Random) -> tuple[dict[Slot, tuple[float, float]], list[float], list[float]]:
    """One step, by events: when each slot was on the wire, when each gate opened, when each layer's update was done."""
    book = IssueOrder(table)
    count = len(table.buckets)
    gates = list(itertools.accumulate(draw.expovariate(1.0) for _ in range(count)))
    events: list[tuple[float, int, Slot | int]] = [(at, bucket, bucket) for bucket, at in enumerate(gates)]
    heapq.heapify(events)
    wire: dict[Slot, tuple[float, float]] = {}
    updated = [float("inf")] * count
    number = itertools.count(count)
    while events:
        now, _, what = heapq.heappop(events)
        if isinstance(what, int):
            book.opened(what)
        elif book.done(what) and book.over(what.bucket):
            updated[what.bucket] = now
        while (slot := book.next()) is not None:
            wire[slot] = now, now + draw.expovariate(1.0)
            heapq.heappush(events, (wire[slot][1], next(number), slot))
    return wire, gates, updated


@pytest.mark.parametrize("rounds", [1, 2])
def test_no_layer_starts_early_under_any_delay(rounds: int) -> None:
    """A hundred steps, with random delays of every gate and every part."""
    draw = random.Random(rounds)
    for _ in range(100):
        table = timetable(draw, rounds)
        wire, gates, updated = step(table, draw)
        assert set(wire) == set(table.slots), "everything went out"
        starts = [wire[slot][0] for slot in table.slots]
        assert starts == sorted(starts), "in the timetable's order"
        for slot, (start, _) in wire.items():
            assert start >= gates[slot.bucket]
            before = [wire[other][1] for other in wire if other.bucket == slot.bucket and other.round < slot.round]
            assert start >= max(before, default=0.0), "a round waits for the one before it"
            others = [
                o
                for o, (a, b) in wire.items()
                if o != slot and a <= start < b and table.slots.index(o) < table.slots.index(slot)
            ]
            assert not others or sum(o.nbytes for o in others) + slot.nbytes <= table.credit
        forward = 0.0
        for bucket in reversed(range(len(table.buckets))):
            forward = max(forward, updated[bucket])
            ends = [end for slot, (_, end) in wire.items() if slot.bucket == bucket]
            assert forward >= max(ends), "a layer waits for all of its parts"
            assert updated[bucket] == max(ends), "and for nothing else"
