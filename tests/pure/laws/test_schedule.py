"""Laws of schedules: a timetable holds everything once, merging is optimal, front layers overtake."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import torch

from tests.pure.laws.catalogues import all_of
from weft.ops import Round, Spec, Sum
from weft.profile import Cost, Measured
from weft.schedule import Schedule, Slot
from weft.schedule.mg_wfbp import merged
from weft.schedule.priority import Priority, front_first
from weft.units import Size

any_specs = st.lists(
    st.tuples(
        st.lists(st.integers(0, 40), max_size=3), st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
    ),
    max_size=12,
).map(lambda rows: [Spec(f"p{at}", tuple(shape), dtype) for at, (shape, dtype) in enumerate(rows)])


def looked(specs: list[Spec], seed: int) -> Measured:
    """Some times and costs, as the first steps might have shown them."""
    draw = random.Random(seed)
    ready = itertools.accumulate(draw.random() for _ in specs)
    points = tuple((4**k, draw.random()) for k in range(1, 8))
    names = [spec.name for spec in specs]
    return Measured(ready_s=dict(zip(names, ready, strict=True)), cost=Cost(points=points), fill_s=draw.random() / 1000)


@all_of(
    *("schedule", "fused(bucket=100B, first=7B)", "fused(bucket=1B)", "fused(bucket=1KiB, first=1MiB)"),
    *(
        "priority(partition=64B, credit=100B, least=40B)",
        "priority(partition=1MiB)",
        "priority(partition=256B, least=1B)",
    ),
)
@hypothesis.given(specs=any_specs, rounds=st.integers(1, 4), seed=st.none() | st.integers(0, 9))
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_a_timetable_holds_everything_once(
    schedule: Schedule, specs: list[Spec], rounds: int, seed: int | None
) -> None:
    def sizes(bucket: Sequence[Spec]) -> tuple[Round, ...]:
        return tuple(Round(Sum, max(1, sum(spec.nbytes for spec in bucket) >> turn)) for turn in range(rounds))

    seen = None if seed is None else looked(specs, seed)
    timetable = schedule.timetable(specs, sizes, seen)
    names = [spec.name for bucket in timetable.buckets for spec in bucket]
    assert sorted(names) == sorted(spec.name for spec in specs)
    assert {spec for bucket in timetable.buckets for spec in bucket} == set(specs)
    assert all(len({spec.dtype for spec in bucket}) == 1 for bucket in timetable.buckets)
    for bucket, group in enumerate(timetable.buckets):
        slots = [slot for slot in timetable.slots if slot.bucket == bucket]
        assert [slot.round for slot in slots] == sorted(slot.round for slot in slots)
        for turn, whole in enumerate(sizes(group)):
            parts = [slot for slot in slots if slot.round == turn]
            assert sorted(slot.part for slot in parts) == list(range(parts[0].parts))
            assert {slot.parts for slot in parts} == {len(parts)}
            assert sum(slot.nbytes for slot in parts) >= whole.nbytes
            if isinstance(schedule, Priority):
                assert max(slot.nbytes for slot in parts) <= schedule.partition
    assert timetable == schedule.timetable(specs, sizes, seen)


# --- merging --------------------------------------------------------------------------------------------------------


def through(ends: Sequence[int], ready: Sequence[float], sizes: Sequence[int], cost: Cost, fill: float) -> float:
    """When the last group is through, by the recurrence of wait-free backpropagation."""
    now = 0.0
    for start, end in itertools.pairwise([0, *ends]):
        size = sum(sizes[start:end])
        now = max(now, ready[end - 1]) + float(cost.seconds(size)) + (fill * size if end - start > 1 else 0.0)
    return now


@hypothesis.given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5000)), min_size=1, max_size=8),
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.sampled_from([0.0, 1e-5, 1e-3]),
)
@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
def test_merging_is_the_best_of_all_groupings(rows: list[tuple[float, int]], times: list[float], fill: float) -> None:
    ready = list(itertools.accumulate(gap for gap, _ in rows))
    sizes = [size for _, size in rows]
    cost = Cost(points=tuple((10**at, seconds) for at, seconds in enumerate(times)))
    best = merged(ready, sizes, cost, fill)
    assert best[-1] == len(rows) and best == sorted(set(best))
    inner = range(1, len(rows))
    large = [float(cost.seconds(0)) < 0.01 * float(cost.seconds(size)) for size in sizes]
    every = [
        ends
        for k in range(len(rows))
        for cuts in itertools.combinations(inner, k)
        for ends in [[*cuts, len(rows)]]
        if all(end - start == 1 or not any(large[start:end]) for start, end in itertools.pairwise([0, *ends]))
    ]
    assert best in every
    least = min(through(ends, ready, sizes, cost, fill) for ends in every)
    soon = [ends for ends in every if through(ends, ready, sizes, cost, fill) <= 1.01 * least + 1e-9]
    assert best in soon
    assert len(best) == min(len(ends) for ends in soon)


def test_merging_does_what_the_paper_says_at_both_ends() -> None:
    """Next to no latency: every parameter for itself. Latency above all: everything at once."""
    ready, sizes = [1.0, 2.0, 3.0, 4.0], [100, 100, 100, 100]
    assert merged(ready, sizes, Cost(points=((0, 0.0), (1000, 0.1)))) == [1, 2, 3, 4]
    assert merged(ready, sizes, Cost(points=((0, 10.0), (1000, 10.1)))) == [4]


def test_groups_that_win_nothing_are_not_made() -> None:
    """The wire is idle most of the time: only what comes last is in a hurry, and the rest may leave together."""
    ready, sizes = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [100, 100, 100, 100, 100, 100]
    assert merged(ready, sizes, Cost(points=((0, 0.01), (1000, 0.3)))) == [5, 6]


def test_what_takes_a_hundred_starts_goes_alone() -> None:
    """Small neighbours share a start; a large one among them would be moved for less than a percent of its time."""
    ready, cost = [0.0, 0.0, 0.0, 0.0, 0.0], Cost(points=((0, 1.0), (10**6, 1001.0)))
    assert merged(ready, [10, 10, 10**6, 10, 10], cost) == [2, 3, 5]
    assert merged(ready, [10, 10, 10**4, 10, 10], cost) == [5]


@hypothesis.given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1)), min_size=1, max_size=8))
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_a_cost_never_falls(rows: list[tuple[int, float]]) -> None:
    cost = Cost(points=tuple(sorted(dict(rows).items())))
    times = [float(cost.seconds(size)) for size in (0, 1, 10, 10**3, 10**5, 10**6, 10**7, 10**8)]
    assert times == sorted(times)


# --- the front layers first -----------------------------------------------------------------------------------------


def test_a_part_that_forward_needs_first_overtakes() -> None:
    """Three layers of three parts; the wire takes as long for a part as backward for a layer."""
    turns = [[[Slot(bucket, 0, part, 3, 1) for part in range(3)]] for bucket in range(3)]
    order = front_first(turns, [0.0, 1.0, 2.0], 1.0)
    assert [(slot.bucket, slot.part) for slot in order] == [
        *((0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (1, 1), (1, 2), (0, 1), (0, 2))
    ]


def test_starts_that_would_take_long_are_shared() -> None:
    """Many small layers: apart on a slow link, where starts are cheap beside sending; together on a fast one."""
    specs = [Spec(f"p{n}", (2**15,), torch.float32) for n in range(64)]
    ready = {spec.name: 1e-3 * n for n, spec in enumerate(specs)}

    def buckets(schedule: Priority, bytes_s: float) -> int:
        cost = Cost(points=((1024, 5e-4), (2**24, 5e-4 + 2**24 / bytes_s)))
        seen = Measured(ready_s=ready, cost=cost)
        return len(schedule.timetable(specs, lambda group: (Round(Sum, sum(s.nbytes for s in group)),), seen).buckets)

    assert buckets(Priority(), 1e7) == 64
    assert buckets(Priority(), 1e10) <= 8
    assert buckets(Priority(least=Size(1)), 1e10) == 64
