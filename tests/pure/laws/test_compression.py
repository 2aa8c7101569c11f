"""Laws of compressors: declared rounds, agreeing replicas, residuals, buckets.

Flows run on loopback (their meaning) and in virtual time (their cost), bare or lowered by a topology.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pure.laws.catalogues import all_of, answers, default, needs
from weft.axis import catalogue
from weft.compression import Bucket, Compressor, Context, Piece, State
from weft.ops import All, Flow, Op, Place, Round, Scatter, Spec, Sum, nbytes
from weft.topology import CollectiveTopology
from weft.transport import loopback, virtual

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
collectives = [topology for topology in answers("topology") if isinstance(topology, CollectiveTopology)]
bare_or_lowered = pytest.mark.parametrize(
    "topology",
    [None, *(topology for topology in collectives if topology.name in ("direct", "ring"))],
    ids=lambda t: "bare" if t is None else str(t),
)
"""As it is meant, and lowered in two ways; that lowering changes nothing is a law of topologies by itself."""
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)

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

    def __init__(self, compressor: Compressor, workers: int, topology: CollectiveTopology | None = None) -> None:
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
    compression: Compressor, topology: CollectiveTopology | None, dtype: torch.dtype
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
    for shapes, topology in itertools.product(SHAPES, collectives):
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
def test_replicas_agree_bit_for_bit(
    compression: Compressor, topology: CollectiveTopology | None, dtype: torch.dtype
) -> None:
    for shapes, workers in itertools.product(SHAPES, (2, 3, 4, 5)):
        specs = specs_of(shapes, dtype)
        crowd = Crowd(compression, workers, topology)
        for step in range(3):
            means = crowd.exchange(specs, draw(specs, workers, step))
            for other in means[1:]:
                assert all(torch.equal(other[name], means[0][name]) for name in other)


@compressors
@bare_or_lowered
def test_lossless_is_the_mean(compression: Compressor, topology: CollectiveTopology | None) -> None:
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
@pytest.mark.parametrize("topology", [None, *(t for t in collectives if t.exact)], ids=str)
@dtypes
def test_buckets_change_no_result(
    compression: Compressor, topology: CollectiveTopology | None, dtype: torch.dtype
) -> None:
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


@compressors
@dtypes
def test_a_push_has_the_declared_bytes_of_a_worker_alone(compression: Compressor, dtype: torch.dtype) -> None:
    """Servers price a push as the rounds of one worker: every payload of an exchange with nobody goes to the server."""
    for spec in itertools.chain.from_iterable(specs_of(shapes, dtype) for shapes in SHAPES):
        crowd = Crowd(compression, 1)
        crowd.exchange([spec], draw([spec], 1, 0))
        assert fit(crowd.rounds[0], compression.rounds([spec], 1))


@compressors
def test_raw_payloads_are_the_gradient_itself(compression: Compressor) -> None:
    specs = specs_of(SHAPES[2], torch.float32)
    assert compression.lossless or not compression.raw
    if compression.raw:
        (declared,) = compression.rounds(specs, 3)
        assert declared == Round(Sum, sum(spec.nbytes for spec in specs))
