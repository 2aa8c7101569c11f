"""Laws over the whole catalogue: whoever adds a file to a folder of answers is held to them without a word.

Flows run on loopback (what they mean) and in virtual time (what they cost), bare or lowered by each topology.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import typing
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from weft.axis import AXES, Answer, catalogue, make
from weft.compression import Bucket, Compressor, Context, Piece, State
from weft.errors import UserError
from weft.ops import All, Collective, Flow, Op, Place, Round, Scatter, Spec, Sum, nbytes
from weft.profile import Cost, Measured
from weft.schedule import Schedule, Slot
from weft.schedule.mg_wfbp import merged
from weft.schedule.priority import Priority, front_first
from weft.strategy import Strategy
from weft.topology import Topology
from weft.topology._parts import fold_groups
from weft.transport import loopback, virtual
from weft.units import Size


def needs(kind: type[Answer]) -> set[str]:
    """The fields without a default."""
    return {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}


def default(kind: type[Answer]) -> Any:
    """An answer as it comes; a wrapper around topk."""
    return make(kind, dict.fromkeys(needs(kind), "topk(ratio=0.3)"))


def all_of(axis: str, *more: str) -> Any:
    """Parametrises with every answer of an axis, and some with other values."""
    answers = [default(kind) for kind in catalogue(axis).values()]
    answers += [getattr(Strategy.parse(text), axis) for text in more]
    return pytest.mark.parametrize(axis, answers, ids=str)


compressors = all_of(
    "compression",
    "topk(ratio=0.3)",
    "topk(ratio=1)",
    "cast(dtype=fp16)",
    "topk(ratio=0.3, sampled=true)",
    "int8(block=8, stochastic=true)",
    "sign(scaled=true)",
    "terngrad(clip=inf)",
    "qsgd(levels=1, bucket=8)",
    "random_k(ratio=0.3, scaled=true)",
    "only(topk(ratio=0.3), min_numel=10)",
    "mixed(onebit, kernels=adacomp(bin=5), vectors=cast)",
    "error_feedback(topk)",
    "error_feedback(cast)",
    "error_feedback(cast(dtype=fp16))",
    "error_feedback(int8)",
    "error_feedback(onebit)",
    "error_feedback(powersgd(rank=1))",
    "error_feedback(threshold(tau=0.3))",
    "error_feedback(adacomp(bin=5))",
)
everyone = [default(kind) for kind in catalogue("topology").values() if issubclass(kind, Topology) and kind.collective]
topologies = pytest.mark.parametrize("topology", everyone, ids=str)
bare_or_lowered = pytest.mark.parametrize(
    "topology",
    [None, *(topology for topology in everyone if topology.name in ("direct", "ring"))],
    ids=lambda t: "bare" if t is None else str(t),
)
"""As it is meant, and lowered in two ways; that lowering changes nothing is a law of topologies by itself."""
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


# --- compression ----------------------------------------------------------------------------------------------------

SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((1,),),
    ((7,), (3, 5)),
    ((100,), (1,), (2, 3, 4), (11, 13)),
    ((257,),),
    ((64, 8), (8,)),
    ((2,), (1, 1), (), (3,)),
    ((0,), (3, 0), (5,)),
)
"""Parameters of a bucket: odd, tiny, one without dimensions, empty ones."""

Grads = dict[str, Tensor]


def specs_of(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Spec]:
    return [Spec(f"p{at}", shape, dtype) for at, shape in enumerate(shapes)]


def draw(specs: Sequence[Spec], workers: int, seed: int) -> list[Grads]:
    """Gradients of every worker, flat, weighted by uneven shares."""
    rng = torch.Generator().manual_seed(seed)
    shares = torch.rand(workers, generator=rng) + 0.1
    return [
        {spec.name: (share * torch.randn(spec.numel, generator=rng)).to(spec.dtype) for spec in specs}
        for share in shares / shares.sum()
    ]


def tapped(flow: Flow[Any], see: Callable[[Op], None]) -> Flow[Any]:
    """The same flow; `see` is shown every intent."""
    result: Any = None
    try:
        while True:
            op = flow.send(result)
            see(op)
            result = yield op
    except StopIteration as stop:
        return stop.value


def as_round(op: Op) -> Round:
    match op:
        case Sum(payload):
            return Round(Sum, nbytes((payload,)))
        case All(payload):
            return Round(All, nbytes(payload))
        case Scatter(parts):
            return Round(Scatter, sum(nbytes(part) for part in parts))
    raise AssertionError(f"a compressor says Sum, All or Scatter, not {op}")


class Crowd:
    """Workers with a state each, who exchange buckets of gradients; `mean` is `grad`'s memory unless told apart."""

    def __init__(self, compressor: Compressor, workers: int, topology: Topology | None = None) -> None:
        self.compressor, self.workers, self.topology = compressor, workers, topology
        self.states: list[State] = [{} for _ in range(workers)]
        self.rounds: list[list[Round]] = []
        self.step = 0

    def exchange(self, specs: Sequence[Spec], grads: Sequence[Grads], *, flat: bool = False) -> list[Grads]:
        """One bucket; returns every worker's means."""
        place = Place(workers=self.workers)
        self.rounds = [[] for _ in range(self.workers)]
        means: list[Grads] = []
        flows = []
        for me, mine in enumerate(grads):
            whole = torch.cat([mine[spec.name] for spec in specs])
            parts = whole.split([spec.numel for spec in specs])
            if not flat:
                parts = tuple(part.clone() for part in parts)
            means.append({spec.name: part for spec, part in zip(specs, parts, strict=True)})
            pieces = tuple(
                Piece(spec, part, part, value=value_of(part)) for spec, part in zip(specs, parts, strict=True)
            )
            ctx = Context(step=self.step, rank=me, workers=self.workers)
            bucket = Bucket(pieces, whole if flat else None)
            flow = self.compressor.exchange(bucket, self.states[me], ctx)
            flow = tapped(flow, lambda op, log=self.rounds[me]: log.append(as_round(op)))  # type: ignore[misc]
            flows.append(flow if self.topology is None else loopback.lowered(flow, self.topology, me, place))
        returned = loopback.run(flows) if self.topology is None else virtual.run(flows, place).results
        for state, new in zip(self.states, returned, strict=True):
            state.update(new)  # as the engine does
        return means


def value_of(grad: Tensor) -> Tensor:
    """Parameters, some larger than their gradients and some smaller."""
    return torch.arange(grad.numel(), dtype=grad.dtype, device=grad.device) % 40


@compressors
@bare_or_lowered
@dtypes
def test_declared_rounds_are_the_observed_ones(
    compression: Compressor, topology: Topology | None, dtype: torch.dtype
) -> None:
    for shapes, workers in itertools.product(SHAPES, (1, 2, 3, 5)):
        specs = specs_of(shapes, dtype)
        crowd = Crowd(compression, workers, topology)
        for step in range(2):
            crowd.exchange(specs, draw(specs, workers, step))
            assert all(fit(seen, compression.rounds(specs, workers)) for seen in crowd.rounds)


def fit(seen: Sequence[Round], declared: Sequence[Round]) -> bool:
    """Exactly so many bytes; or at most, where a bound is given."""
    return len(seen) == len(declared) and all(
        a.op is b.op and (a.nbytes == b.nbytes if b.bound is None else a.nbytes <= b.bound)
        for a, b in zip(seen, declared, strict=True)
    )


@compressors
def test_rounds_need_no_values(compression: Compressor) -> None:
    """In virtual time gradients have sizes alone, and the flows are the same."""
    for shapes, topology in itertools.product(SHAPES, everyone):
        specs = specs_of(shapes, torch.float32)
        grads = [{spec.name: torch.empty(spec.numel, device="meta") for spec in specs}] * 3
        crowd = Crowd(compression, 3, topology)
        crowd.exchange(specs, grads)
        assert all(
            [(each.op, each.nbytes) for each in seen]
            == [(each.op, each.nbytes) for each in compression.rounds(specs, 3)]
            for seen in crowd.rounds
        )


@compressors
@bare_or_lowered
@dtypes
def test_replicas_agree_bit_for_bit(compression: Compressor, topology: Topology | None, dtype: torch.dtype) -> None:
    for shapes, workers in itertools.product(SHAPES, (2, 3, 4, 5)):
        specs = specs_of(shapes, dtype)
        crowd = Crowd(compression, workers, topology)
        for step in range(3):
            means = crowd.exchange(specs, draw(specs, workers, step))
            for other in means[1:]:
                assert all(torch.equal(other[name], means[0][name]) for name in other)


@compressors
@bare_or_lowered
def test_lossless_is_the_mean(compression: Compressor, topology: Topology | None) -> None:
    for shapes, workers in itertools.product(SHAPES, (1, 2, 3, 5)):
        specs = specs_of(shapes, torch.float64)
        grads = draw(specs, workers, 0)
        means = Crowd(compression, workers, topology).exchange(specs, grads)
        exact = all(
            torch.allclose(means[0][spec.name], sum(mine[spec.name] for mine in grads), rtol=0, atol=1e-14)  # type: ignore[arg-type]
            for spec in specs
        )
        assert exact or not compression.lossless


@compressors
@dtypes
def test_what_is_not_sent_is_owed(compression: Compressor, dtype: torch.dtype) -> None:
    """owed = grad - sent, rounded once; with one worker alone the mean is what was sent. Any two may share memory."""
    if not compression.approximates:
        return
    for shapes in SHAPES:
        specs = specs_of(shapes, dtype)
        (grads,) = draw(specs, 1, 0)
        results = []
        for share_owed, share_mean in itertools.product((False, True), repeat=2):
            pieces = []
            for spec in specs:
                grad = grads[spec.name].clone()
                residual = grad if share_owed else torch.full_like(grad, 9)
                mean = grad if share_mean and not share_owed else torch.full_like(grad, 9)
                pieces.append(Piece(spec, grad, mean, residual))
            state: State = {}
            if compression.tracks_residual:  # it answers for what it owes itself, in its state
                pieces = [dataclasses.replace(piece, residual=None) for piece in pieces]
            ctx = Context(step=0, rank=0, workers=1)
            (state,) = loopback.run([compression.exchange(Bucket(tuple(pieces)), state, ctx)])
            for piece in pieces:
                residual = state[piece.spec.name]["residual"] if compression.tracks_residual else piece.residual
                assert residual is not None
                assert torch.equal(residual, grads[piece.spec.name] - piece.mean)
                results.append(piece.mean.clone())
        for at, first in enumerate(results[: len(specs)]):
            assert all(torch.equal(other, first) for other in results[at :: len(specs)])


lossy = [
    answer
    for kind in catalogue("compression").values()
    if not needs(kind) and not (answer := default(kind)).lossless and answer.approximates
]
accounts = [kind for kind in catalogue("compression").values() if kind.tracks_residual]  # type: ignore[attr-defined]


@pytest.mark.parametrize("inner", lossy, ids=str)
@pytest.mark.parametrize("kind", accounts)
@dtypes
def test_error_feedback_conserves(kind: Any, inner: Compressor, dtype: torch.dtype) -> None:
    """owed after = grad + owed before - sent: exactly for a worker alone, and summed over several."""
    specs = specs_of(SHAPES[2], dtype)
    alone, crowd = Crowd(kind(inner=inner), 1), Crowd(kind(inner=inner), 3)
    before = {spec.name: torch.zeros(spec.numel, dtype=dtype) for spec in specs}
    all_before = {spec.name: torch.zeros(spec.numel, dtype=torch.float64) for spec in specs}
    ever_owed = False
    for step in range(5):
        (mine,) = grads = draw(specs, 1, step)
        (sent,) = alone.exchange(specs, grads)
        theirs = draw(specs, 3, step)
        means = crowd.exchange(specs, theirs)[0]
        for spec in specs:
            after = alone.states[0][spec.name]["residual"].clone()
            assert torch.equal(after, before[spec.name] + mine[spec.name] - sent[spec.name])
            before[spec.name] = after
            ever_owed |= bool(after.any())
            residual = sum(state[spec.name]["residual"].double() for state in crowd.states)
            given = all_before[spec.name] + sum(grad[spec.name].double() for grad in theirs)
            # what each sends is added up in the wire's own precision
            assert torch.allclose(
                given, means[spec.name].double() + residual, rtol=0, atol=1e-6 if small(inner) else 0.02
            )
            all_before[spec.name] = typing.cast(Tensor, residual)
    assert ever_owed


def small(inner: Compressor) -> bool:
    """Whether a compressor's sums keep the gradient's precision."""
    return all(round.op is not Sum for round in inner.rounds([Spec("p", (8,))], 3))


@compressors
@pytest.mark.parametrize("topology", [None, *(t for t in everyone if t.exact)], ids=str)
@dtypes
def test_buckets_change_no_result(compression: Compressor, topology: Topology | None, dtype: torch.dtype) -> None:
    """State is kept by parameter: the same parameters in other buckets, even changing ones, give the same bits."""
    specs = specs_of(SHAPES[2], dtype)
    splits: list[list[list[Spec]]] = [
        [specs],
        [[spec] for spec in specs],
        [specs[:1], specs[1:]],
        [specs[2:], specs[:2]],
        [list(reversed(specs))],
    ]
    always = [Crowd(compression, 3, topology) for _ in splits]
    changing = Crowd(compression, 3, topology)
    for step in range(5):
        grads = draw(specs, 3, step)
        results = [exchanged(crowd, split, grads) for crowd, split in zip(always, splits, strict=True)]
        results.append(exchanged(changing, splits[step % len(splits)], grads))
        for other in results[1:]:
            assert all(torch.equal(other[name], results[0][name]) for name in results[0])
    names = {spec.name for spec in specs}
    assert all(set(state) <= names for state in always[0].states)


def exchanged(crowd: Crowd, split: Sequence[Sequence[Spec]], grads: Sequence[Grads]) -> Grads:
    """One step in several buckets, some of whose pieces lie side by side as the runtime's do."""
    means: Grads = {}
    for at, bucket in enumerate(split):
        means |= crowd.exchange(bucket, grads, flat=at % 2 == 0)[0]
    crowd.step += 1
    return means


# --- topology -------------------------------------------------------------------------------------------------------

OPS = (Sum, All, Scatter)


def whole_numbers(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(100 * rank + size)
    return torch.randint(-9, 10, (size,), generator=rng).to(dtype)


def intent(op: type[Collective], rank: int, size: int, workers: int) -> Collective:
    if op is Sum:
        return Sum(whole_numbers(rank, size))
    if op is All:
        return All((whole_numbers(rank, size), whole_numbers(rank, 3, torch.int32)))
    return Scatter([(whole_numbers(rank, size + to), whole_numbers(to, 1, torch.uint8)) for to in range(workers)])


def stated(op: Collective) -> Flow[Any]:
    return (yield op)


def same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor):
        return got.dtype == wanted.dtype and torch.equal(got, wanted)
    return len(got) == len(wanted) and all(map(same, got, wanted))


@topologies
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("workers", range(1, 10))
def test_lowered_is_what_is_meant(topology: Topology, op: type[Collective], workers: int) -> None:
    """Bit for bit on whole numbers, also where there are fewer of them than workers; and nobody's payload moves."""
    for size in (1, 2, 5, 8, 17, 64):
        wanted = loopback.run([stated(intent(op, rank, size, workers)) for rank in range(workers)])
        mine = [intent(op, rank, size, workers) for rank in range(workers)]
        place = Place(workers=workers)
        for run in (loopback.run, lambda flows, place=place: virtual.run(flows, place).results):
            flows = [topology.lower(mine[rank], rank, place) for rank in range(workers)]
            assert same(run(flows), wanted), size
        assert all(same(payload_of(a), payload_of(intent(op, r, size, workers))) for r, a in enumerate(mine))


def payload_of(op: Any) -> Any:
    return op.parts if isinstance(op, Scatter) else op.payload


LINKS = {"balanced": (2.0**-12, 2.0**24), "bytes alone": (0.0, 2.0**24), "latency alone": (2.0**-12, float("inf"))}
"""(seconds, bytes per second): powers of two, so that sums of times are exact."""
links = pytest.mark.parametrize("link", LINKS)


def place_of(workers: int, link: str = "balanced") -> Place:
    latency_s, bytes_per_s = LINKS[link]
    return Place(workers=workers, latency_s=latency_s, bytes_per_s=bytes_per_s)


def numel_of(workers: int) -> int:
    """Divides into as many equal parts as any of the topologies makes."""
    return 16 * workers * fold_groups(workers)


@topologies
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
@links
def test_virtual_time_is_the_closed_form(topology: Topology, op: type[Collective], workers: int, link: str) -> None:
    numel, place = numel_of(workers), place_of(workers, link)
    assert virtual.cost(topology, op, numel, place).seconds == topology.seconds(op, 4 * numel, place)


@topologies
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("workers", [3, 5, 6, 7, 9, 12, 13])
@links
def test_virtual_time_where_workers_are_no_power_of_two(
    topology: Topology, op: type[Collective], workers: int, link: str
) -> None:
    """Exact where nobody folds; else off by at most what the largest message takes, a + load S/b.

    The load is n payloads for All and one for Sum. The closed form adds up each round's largest message, as if rounds
    were apart: in truth a folded worker's message meets the first round's at its partner's port (later), and workers
    without a folded partner run ahead (earlier). For recursive_doubling's Sum both may happen twice: two messages.
    """
    numel, place = numel_of(workers), place_of(workers, link)
    seconds, closed = virtual.cost(topology, op, numel, place).seconds, topology.seconds(op, 4 * numel, place)
    off = 0.0
    if topology.name in FOLDING and op is not Scatter:
        load = workers if op is All else 1
        off = place.latency_s + load * 4 * numel / place.bytes_per_s
        off *= 2 if topology.name == "recursive_doubling" and op is Sum else 1
    elif topology.name == "tree" and op is Sum:  # who has no sibling sends early, up and down
        off = 2 * (place.latency_s + 4 * numel / place.bytes_per_s)
    assert abs(seconds - closed) <= off


FOLDING = ("halving_doubling", "recursive_doubling")


@topologies
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("workers", [*range(1, 10), 12, 16])
def test_declared_bytes_are_those_of_the_busiest(topology: Topology, op: type[Collective], workers: int) -> None:
    numel = numel_of(workers)
    sent = virtual.cost(topology, op, numel, place_of(workers)).sent_bytes
    assert max(sent) == pytest.approx(topology.wire_bytes(op, 4 * numel, workers), rel=1e-12)


@topologies
@pytest.mark.parametrize("op", OPS)
def test_nobody_waits_for_oneself(topology: Topology, op: type[Collective]) -> None:
    assert topology.seconds(op, 1000, place_of(1)) == 0
    assert topology.wire_bytes(op, 1000, 1) == 0


# --- schedule -------------------------------------------------------------------------------------------------------

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


# --- spelling -------------------------------------------------------------------------------------------------------


def values_of(hint: Any, depth: int) -> st.SearchStrategy[Any]:
    if isinstance(hint, type) and issubclass(hint, Answer):
        return answers_of(hint.axis, depth + 1)
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    return {
        float: st.floats(0, 1, exclude_min=True) | st.floats(allow_nan=False),
        int: st.integers(0, 10**6) | st.integers(),
        bool: st.booleans(),
        str: st.text("abz019_ ./-", max_size=6),
        Size: (st.integers(1, 2**40) | st.integers(1, 64).map(lambda n: n * 2**20)).map(Size),
    }[hint]


@st.composite
def answers_of(draw: Any, axis: str, depth: int = 0) -> Answer:
    """Any answer of an axis, with any values that it accepts."""
    kinds = [kind for kind in catalogue(axis).values() if depth < 3 or "inner" not in needs(kind)]
    kind = draw(st.sampled_from(kinds))
    hints = typing.get_type_hints(kind)
    given = {
        field.name: draw(values_of(hints[field.name], depth))
        for field in dataclasses.fields(kind)
        if field.name in needs(kind) or draw(st.booleans())
    }
    try:
        return kind(**given)
    except ValueError:
        hypothesis.reject()


@st.composite
def strategies(draw: Any) -> Strategy:
    return Strategy(**{axis: draw(answers_of(axis)) for axis in AXES})


@hypothesis.given(strategy=strategies())
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
def test_one_spelling_that_round_trips(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy
    assert str(Strategy.parse(str(strategy))) == str(strategy)
    assert Strategy.from_toml(strategy.to_toml()) == strategy
    assert Strategy.from_table(strategy.spelled_out()) == strategy


words = [
    *(name for axis in AXES for name in catalogue(axis)),
    *AXES,
    "ratio",
    "inner",
    "bucket",
    "dtype",
    "bf16",
    "inf",
]
marks = [" / ", "(", ")", ",", "=", " ", "0.1", "-1", "25MiB", "1e999", '"', "'", "@", "true", "9" * 30]
fragments = st.lists(st.sampled_from(words + marks) | st.text(max_size=3), max_size=12).map("".join)


@st.composite
def nearly_spelled(draw: Any) -> str:
    """A strategy's spelling with one piece cut out or put in."""
    text = str(draw(strategies()))
    at, to = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    return text[:at] + draw(st.sampled_from(words + marks) | st.just("")) + text[to:]


@hypothesis.given(text=st.text() | fragments | nearly_spelled())
@hypothesis.settings(max_examples=500, deadline=None, derandomize=True)
def test_any_text_is_a_strategy_or_a_user_error(text: str) -> None:
    for read in (Strategy.parse, Strategy.from_toml):
        with contextlib.suppress(UserError):
            strategy = read(text)
            assert Strategy.parse(str(strategy)) == strategy


texts = st.sampled_from(words) | st.text(max_size=4)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "ratio", ""]), inner),
    max_leaves=4,
)


@st.composite
def nearly_right_tables(draw: Any) -> Any:
    """A strategy as a table with one value replaced by anything, wherever it stands, or one added."""
    table = draw(strategies()).spelled_out()
    place, key = draw(st.sampled_from([*entries(table), (table, "strategy"), (table["compression"], "")]))
    place[key] = draw(plain_values)
    return table


def entries(table: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    below = [entry for value in table.values() if isinstance(value, dict) for entry in entries(value)]
    return [(table, key) for key in table] + below


@hypothesis.given(table=plain_values | nearly_right_tables())
@hypothesis.settings(max_examples=500, deadline=None, derandomize=True)
def test_any_table_is_a_strategy_or_a_user_error(table: Any) -> None:
    with contextlib.suppress(UserError):
        strategy = Strategy.from_table(table)
        assert Strategy.parse(str(strategy)) == strategy


@pytest.mark.parametrize(
    "text",
    ["@\0", f"topk(ratio={'9' * 400})", f"topk(ratio={'9' * 5000})", f"fused(bucket={'9' * 5000})"],
    ids=["null", "400 digits", "5000 digits", "5000-digit size"],
)
def test_monstrous_text_is_a_user_error(text: str) -> None:
    with pytest.raises(UserError):
        Strategy.parse(text)


def test_deep_nesting_is_a_user_error() -> None:
    with pytest.raises(UserError, match="nested deeper"):
        Strategy.parse("error_feedback(" * 5000)
