"""The contracts are rich enough: five techniques that do not ship, sketched as answers and run on loopback.

No interpreter in `transport/` knows any of them. Where a contract has no word for what a sketch must say, a
comment starts with "Gap:".
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.axis import catalogue, make
from weft.compression import Bucket, Compressor, Context, Piece
from weft.compression import State as Memory
from weft.compression.error_feedback import ErrorFeedback
from weft.errors import WeftError
from weft.ops import (
    All,
    Collective,
    Flow,
    Op,
    Payload,
    Place,
    Pull,
    Push,
    Recv,
    Reply,
    Round,
    Scatter,
    Send,
    Serve,
    Spec,
    Sum,
    Swap,
    nbytes,
)
from weft.optimization import Exchange, Optimization
from weft.optimization import State as Outer
from weft.synchrony import Synchrony, View
from weft.synchrony.asp import Asp
from weft.topology import Topology
from weft.topology.direct import Direct
from weft.transport import loopback, virtual

TOPOLOGIES: dict[str, Any] = {
    "bare": None,
    **{
        name: make(kind, {})
        for name, kind in catalogue("topology").items()
        if issubclass(kind, Topology) and kind.everyone
    },
}
everywhere = pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
crowds = pytest.mark.parametrize("workers", [2, 3, 4])

Grads = dict[str, Tensor]


# --- the bench ----------------------------------------------------------------------------------------------


def tapped(flow: Flow[Any], see: Callable[[Op, Any], None]) -> Flow[Any]:
    """The same flow; `see` is shown every intent with its result."""
    result: Any = None
    while True:
        try:
            op = flow.send(result)
        except StopIteration as stop:
            return stop.value
        result = yield op
        see(op, result)


def as_round(op: Collective) -> Round:
    """A collective as sizes: the bytes of all that one worker gives."""
    match op:
        case Sum(tensor):
            return Round(Sum, nbytes((tensor,)))
        case All(payload):
            return Round(All, nbytes(payload))
        case Scatter(parts):
            return Round(Scatter, sum(nbytes(part) for part in parts))
    raise AssertionError(op)


def check_like(op: Op, result: Any) -> None:
    """What is received has the shapes and types that were announced: a real transport allocates by them."""
    if isinstance(op, Recv):
        assert [(t.shape, t.dtype) for t in result] == [(t.shape, t.dtype) for t in op.like]


@dataclass
class Crowd:
    """Workers with one compressor's state each, who exchange gradients through a topology (None: bare)."""

    compressor: Compressor
    workers: int
    topology: Topology | None = None

    def __post_init__(self) -> None:
        self.states: list[Memory] = [{} for _ in range(self.workers)]
        self.rounds: list[list[Round]] = []
        self.sent_bytes: list[int] = []
        self.step = 0

    def exchange(self, grads: Sequence[Grads]) -> list[Grads]:
        """One exchange of one bucket; returns every worker's means, in the shapes of the gradients."""
        place = Place(workers=self.workers)
        self.rounds = [[] for _ in range(self.workers)]
        means, flows = [], []
        for me, mine in enumerate(grads):
            flat = {name: grad.flatten().clone() for name, grad in mine.items()}
            # The hardest case: `mean` is `grad`'s memory.
            pieces = [Piece(spec, flat[spec.name], flat[spec.name]) for spec in specs_of(mine)]
            ctx = Context(step=self.step, rank=me, workers=self.workers)
            flow = self.compressor.exchange(Bucket(tuple(pieces)), self.states[me], ctx)
            flow = tapped(flow, lambda op, _, log=self.rounds[me]: log.append(as_round(op)))  # type: ignore[misc]
            if self.topology is not None:
                flow = tapped(loopback.lowered(flow, self.topology, me, place), check_like)
            flows.append(flow)
            means.append({name: flat[name].view(grad.shape) for name, grad in mine.items()})
        outcome = virtual.run(flows, place)  # loopback that also counts bytes
        self.states, self.sent_bytes = outcome.results, outcome.sent_bytes
        self.step += 1
        return means

    def kept(self, name: str, key: str) -> list[Tensor]:
        """What each worker's state holds for a parameter."""
        return [state[name][key] for state in self.states if key in state.get(name, {})]


def specs_of(grads: Grads) -> list[Spec]:
    return [Spec(name, tuple(grad.shape), grad.dtype) for name, grad in grads.items()]


SHAPES = {"linear": (7, 5), "bias": (7,), "conv": (4, 3, 2, 2)}


def draw(workers: int, seed: int) -> list[Grads]:
    """Random gradients in float64, weighted by the workers' uneven shares."""
    rng = torch.Generator().manual_seed(seed)
    shares = torch.rand(workers, generator=rng, dtype=torch.float64)
    shares /= shares.sum()
    return [{name: share * normal(*shape, rng=rng) for name, shape in SHAPES.items()} for share in shares]


def normal(*shape: int, rng: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def total(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([*tensors]).sum(0)


def assert_replicas_agree(means: Sequence[Grads]) -> None:
    for other in means[1:]:
        assert all(torch.equal(means[0][name], other[name]) for name in means[0])


def close(a: Tensor, b: Tensor, atol: float = 1e-12) -> bool:
    return torch.allclose(a, b, rtol=0, atol=atol)


# --- 1. PowerSGD: two sums, shapes, a warm start ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PowerSgd(Compressor):
    """Each matrix as a product of two thin ones, by a warm power iteration [Vogels et al. 2019, alg. 1].

    P = M Q is summed and orthogonalised, then Q = M'P is summed: linear in M, so sums of shares are means.
    """

    rank: int = 2

    def exchange(self, bucket: Bucket, state: Memory, ctx: Context) -> Flow[Memory]:
        matrices = [piece for piece in bucket.pieces if len(piece.spec.shape) > 1]
        vectors = [piece for piece in bucket.pieces if len(piece.spec.shape) <= 1]
        tall = [matrix(piece) @ self._warm(piece, state, ctx) for piece in matrices]
        sums = yield from added(tall + [piece.grad for piece in vectors])
        bases = [torch.linalg.qr(p).Q for p in sums[: len(tall)]]
        mine = [matrix(piece).T @ basis for piece, basis in zip(matrices, bases, strict=True)]
        wide = yield from added(mine)
        for piece, basis, own, q in zip(matrices, bases, mine, wide, strict=True):
            if piece.owed is not None:  # before `mean` is written: the three may share memory
                piece.owed.copy_((matrix(piece) - basis @ own.T).flatten())
            piece.mean.copy_((basis @ q.T).flatten())
            state[piece.spec.name]["q"] = q.clone()
        for piece, mean in zip(vectors, sums[len(tall) :], strict=True):
            if piece.owed is not None:
                piece.owed.zero_()
            piece.mean.copy_(mean)
        return state

    def rounds(self, specs: Sequence[Spec]) -> tuple[Round, ...]:
        sizes = [(spec, spec.shape[0], spec.numel // spec.shape[0]) for spec in specs if len(spec.shape) > 1]
        first = sum(self._r(rows, cols) * rows * spec.dtype.itemsize for spec, rows, cols in sizes)
        second = sum(self._r(rows, cols) * cols * spec.dtype.itemsize for spec, rows, cols in sizes)
        first += sum(spec.nbytes for spec in specs if len(spec.shape) <= 1)
        return (Round(Sum, first), Round(Sum, second)) if sizes else (Round(Sum, first),)

    def _r(self, rows: int, cols: int) -> int:
        return min(self.rank, rows, cols)

    def _warm(self, piece: Piece, state: Memory, ctx: Context) -> Tensor:
        memory = state.setdefault(piece.spec.name, {})
        if "q" not in memory:
            rows, cols = matrix(piece).shape
            # Gap: everyone must draw the same Q, but `ctx.generator` draws by rank; so we pose as rank 0.
            rng = replace(ctx, rank=0, step=0).generator(piece.spec.name, piece.grad.device)
            like = {"dtype": piece.grad.dtype, "device": piece.grad.device}
            memory["q"] = torch.randn(cols, self._r(rows, cols), generator=rng, **like)  # type: ignore[call-overload]
        return memory["q"]


def matrix(piece: Piece) -> Tensor:
    return piece.grad.view(piece.spec.shape[0], -1)


def added(parts: Sequence[Tensor]) -> Flow[list[Tensor]]:
    """The sum over workers of several tensors, as one `Sum`; none where there is nothing to add."""
    if not parts:
        return []
    flat = yield Sum(torch.cat([part.flatten() for part in parts]))
    cut = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(cut, parts, strict=True)]


@everywhere
@crowds
def test_powersgd_loses_nothing(topology: Topology | None, workers: int) -> None:
    crowd = Crowd(ErrorFeedback(inner=PowerSgd(rank=2)), workers, topology)
    owed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(4):
        grads = draw(workers, seed=step)
        means = crowd.exchange(grads)
        assert_replicas_agree(means)
        assert all(tuple(log) == crowd.compressor.rounds(specs_of(grads[0])) for log in crowd.rounds)
        for name, shape in SHAPES.items():
            given = total([grad[name] for grad in grads]) + owed[name]
            owed[name] = total(crowd.kept(name, "owed")).view(shape)
            assert close(given, means[0][name] + owed[name])
    assert owed["linear"].norm() > 0.1 and not owed["bias"].any()


@everywhere
@crowds
def test_powersgd_is_exact_where_the_mean_has_its_rank(topology: Topology | None, workers: int) -> None:
    """Each worker's matrix has full rank, the mean has rank 2: exact only if all multiply by the same Q."""
    crowd = Crowd(PowerSgd(rank=3), workers, topology)
    rng = torch.Generator().manual_seed(1)
    for _ in range(3):  # the second and third steps start warm, from another matrix's Q
        mean, noise = normal(7, 2, rng=rng) @ normal(2, 5, rng=rng), normal(workers, 7, 5, rng=rng)
        shares = mean / workers + noise - noise.mean(0)
        means = crowd.exchange([{"linear": share} for share in shares])
        assert_replicas_agree(means)
        assert close(means[0]["linear"], mean, atol=1e-10)


def test_powersgd_warms_up_to_the_best_approximation() -> None:
    grads = draw(2, seed=7)
    target = total([grad["linear"] for grad in grads])
    best = torch.linalg.svdvals(target)[2:].norm()  # what any rank 2 must miss [Eckart & Young 1936]
    warm, cold = Crowd(PowerSgd(rank=2), 2), Crowd(PowerSgd(rank=2), 2)
    first = (cold.exchange(grads)[0]["linear"] - target).norm()
    for _ in range(200):
        last = (warm.exchange(grads)[0]["linear"] - target).norm()
    assert last < best * (1 + 1e-6) < first


@pytest.mark.parametrize("topology", [None, Direct()], ids=["bare", "direct"])
def test_powersgd_does_not_depend_on_buckets(topology: Topology | None) -> None:
    together = Crowd(ErrorFeedback(inner=PowerSgd()), 3, topology)
    apart = {name: Crowd(ErrorFeedback(inner=PowerSgd()), 3, topology) for name in SHAPES}
    for step in range(3):
        grads = draw(3, seed=step)
        whole = together.exchange(grads)[0]
        for name in SHAPES:
            alone = apart[name].exchange([{name: grad[name]} for grad in grads])[0]
            assert torch.equal(whole[name], alone[name])


# --- 2. DC-ASGD: a server that makes late gradients fit -----------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DcAsgd(Synchrony):
    """Asynchronous; a late gradient is moved to the model now by g g, a cheap Hessian [Zheng et al. 2017].

    Gap: the adaptive variant (their DC-ASGD-a) needs a running mean of g g, and `correct` has no state.
    """

    everyone: ClassVar[bool] = False
    lam: float = 0.0

    def may_start(self, me: int, view: View) -> bool:
        return True

    def quorum(self, view: View) -> int:
        return 1

    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        return grad + self.lam * grad * grad * (now - read)


Event = tuple[str, int]


def serve(how: Synchrony, model: Tensor, lr: float, workers: int, log: list[Event]) -> Flow[Tensor]:
    """A server of any synchrony: it keeps what each worker read, and steps whenever a quorum has come in."""
    read: dict[int, tuple[Tensor, int]] = {}
    clocks = [0] * workers
    waiting: list[Tensor] = []
    version = 0
    while (request := (yield Serve())) is not None:
        sender, ask = request
        log.append((type(ask).__name__, sender))
        if isinstance(ask, Pull):
            read[sender] = model, version
            yield Reply(sender, (model,))
            continue
        assert isinstance(ask, Push)
        then, since = read[sender]
        grad = how.correct(ask.payload[0], model, then, version - since)
        clocks[sender] += 1
        if grad is not None:
            waiting.append(grad)
        if len(waiting) >= how.quorum(View(clocks=tuple(clocks))):
            model = model - lr * total(waiting)
            version += 1
            waiting.clear()
        yield Reply(sender, (torch.tensor(grad is not None),))
    return model


def ask_server(target: Tensor, server: int, conductor: int, steps: int) -> Flow[None]:
    """A worker: pull in one turn, compute and push in the next."""
    for _ in range(steps):
        yield Recv(conductor, ())
        (model,) = yield Pull(server)
        yield Send(conductor, ())
        yield Recv(conductor, ())
        (accepted,) = yield Push(server, (slope(model, target),))
        yield Send(conductor, ())
        assert accepted


def conduct(turns: Sequence[int], at_once: int) -> Flow[None]:
    """Gives turns, `at_once` at a time: loopback knows no time, so this makes workers fast and slow."""
    for i in range(0, len(turns), at_once):
        for actor in turns[i : i + at_once]:
            yield Send(actor, ())
        for actor in turns[i : i + at_once]:
            yield Recv(actor, ())


def slope(model: Tensor, target: Tensor) -> Tensor:
    return torch.sin(model) + (model - target)


def train_with_server(how: Synchrony, seed: int) -> tuple[Tensor, list[Event]]:
    steps, lr = 6, 0.1
    targets = torch.linspace(-2, 2, 12, dtype=torch.float64).view(4, 3)
    turns = [worker for worker in range(4) for _ in range(2 * steps)]
    random.Random(seed).shuffle(turns)
    log: list[Event] = []
    flows = [ask_server(target, server=4, conductor=5, steps=steps) for target in targets]
    model = torch.ones(3, dtype=torch.float64)
    return loopback.run([*flows, serve(how, model, lr, 4, log), conduct(turns, 1)])[4], log


def replay(log: Sequence[Event], lam: float, lr: float = 0.1) -> tuple[Tensor, int]:
    """The same arrivals in one loop, by the paper's formula: the model and the greatest staleness."""
    targets = torch.linspace(-2, 2, 12, dtype=torch.float64).view(4, 3)
    model = torch.ones(3, dtype=torch.float64)
    backup, since, pushes, stalest = {}, {}, 0, 0
    for kind, worker in log:
        if kind == "Pull":
            backup[worker], since[worker] = model.clone(), pushes
        else:
            g = slope(backup[worker], targets[worker])
            model = model - lr * (g + lam * g * g * (model - backup[worker]))
            stalest, pushes = max(stalest, pushes - since[worker]), pushes + 1
    return model, stalest


@pytest.mark.parametrize("seed", range(5))
def test_dc_asgd_equals_its_sequential_recomputation(seed: int) -> None:
    model, log = train_with_server(DcAsgd(lam=0.5), seed)
    expected, stalest = replay(log, lam=0.5)
    assert len(log) == 2 * 4 * 6 and stalest >= 4
    assert close(model, expected)
    assert not close(model, replay(log, lam=0.0)[0], atol=1e-3)


def test_dc_asgd_without_compensation_is_asgd() -> None:
    plain, log = train_with_server(Asp(), seed=3)
    compensated, same_log = train_with_server(DcAsgd(lam=0.0), seed=3)
    assert log == same_log and torch.equal(plain, compensated)
    assert DcAsgd().quorum(View(clocks=(5, 0, 2))) == 1


def test_dc_asgd_makes_late_gradients_fit() -> None:
    read, now = torch.tensor([2.0]), torch.tensor([2.2])
    late, fresh = -1 / read, -1 / now  # of -log x, whose second derivative is its slope squared
    fitted = DcAsgd(lam=1.0).correct(late, now, read, staleness=1)
    assert fitted is not None and (fitted - fresh).abs() < 0.2 * (late - fresh).abs()


# --- 3. Streaming DiLoCo: fragments that leave now and arrive later -----------------------------------------


@dataclass(frozen=True, kw_only=True)
class StreamingDiloco(Optimization):
    """Fragments take turns; outer Nesterov on the mean delta, tau steps late [Douillard et al. 2025, alg. 2].

    Gap: the contract does not say what a delta is. Here: `state["anchor"] - mine`, and whoever drives puts
    the first model there. Only `merge` knows it later: it moves the anchor, and mixes it with `mine`.
    """

    every: int = 1
    fragments: int = 1
    tau: int = 0
    lr: float = 1.0
    momentum: float = 0.0
    mix: float = 0.0

    def due(self, step: int) -> tuple[Exchange, ...]:
        return tuple(
            Exchange(what="delta", fragment=f, finish_step=step + self.tau)
            for f in range(self.fragments)
            if (step + 1 - f * self.every // self.fragments) % self.every == 0
        )

    def merge(self, mine: Tensor, theirs: Tensor, state: Outer) -> tuple[Tensor, Outer]:
        speed = self.momentum * state.get("speed", torch.zeros_like(mine)) + theirs
        anchor = state["anchor"] - self.lr * (theirs + self.momentum * speed)
        return self.mix * mine + (1 - self.mix) * anchor, {"anchor": anchor, "speed": speed}


STRETCH = torch.tensor([1.0, 0.7, 0.4, 1.3, 0.9, 0.6], dtype=torch.float64)
INNER_LR = 0.1


def bowls(workers: int) -> Tensor:
    """One quadratic bowl per worker: where its bottom is."""
    return normal(workers, 6, rng=torch.Generator().manual_seed(5))


Walk = tuple[Tensor, list[Outer], list[Tensor]]
"""A worker's last model, its outer states by fragment, and its model after each step."""


def walk(how: StreamingDiloco, me: int, workers: int, steps: int) -> Flow[Walk]:
    """A worker: inner steps; deltas go to its carrier when due and are fetched when they must enter."""
    model, bottom, path = torch.zeros(6, dtype=torch.float64), bowls(workers)[me], []
    parts = model.tensor_split(how.fragments)
    states: list[Outer] = [{"anchor": part.clone()} for part in parts]
    under_way: list[Exchange] = []
    for step in range(steps):
        model -= INNER_LR * STRETCH * (model - bottom)
        for exchange in how.due(step):
            assert exchange.what == "delta" and exchange.fragment is not None
            yield Send(me, ((states[exchange.fragment]["anchor"] - parts[exchange.fragment]) / workers,))
            under_way.append(exchange)
        # Gap: "finished before step `finish_step` begins" contradicts `gradient`, where finish_step=step.
        # Here, as there: it enters once `finish_step` has been computed.
        while under_way and under_way[0].finish_step <= step:
            f = under_way.pop(0).fragment
            assert f is not None
            (theirs,) = yield Recv(me, (parts[f],))
            merged, states[f] = how.merge(parts[f], theirs, states[f])
            parts[f].copy_(merged)
        path.append(model.clone())
    return model, states, path


def carry(how: StreamingDiloco, me: int, workers: int, steps: int) -> Flow[None]:
    """A worker's carrier, an actor of its own: it sums deltas while the worker goes on."""
    like = torch.zeros(6, dtype=torch.float64).tensor_split(how.fragments)
    for exchange in (exchange for step in range(steps) for exchange in how.due(step)):
        assert exchange.fragment is not None
        (delta,) = yield Recv(workers + me, (like[exchange.fragment],))
        mean = yield Sum(delta)
        yield Send(workers + me, (mean,))


def stream(how: StreamingDiloco, steps: int, n: int = 4) -> list[Walk]:
    """Actors 0..n-1 are the carriers, so that a topology can number them; n..2n-1 are their workers."""
    place = Place(workers=n)
    carriers = [loopback.lowered(carry(how, me, n, steps), Direct(), me, place) for me in range(n)]
    return loopback.run([*carriers, *(walk(how, me, n, steps) for me in range(n))])[n:]


def stream_by_hand(how: StreamingDiloco, steps: int, workers: int = 4) -> tuple[Tensor, Tensor]:
    """The algorithm over all workers at once, in arrays: returns the anchor and every worker's model."""
    anchor, speed = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    models, bottoms = torch.zeros(workers, 6, dtype=torch.float64), bowls(workers)
    cuts = torch.arange(6).tensor_split(how.fragments)
    in_the_air: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for step in range(steps):
        models = models - INNER_LR * STRETCH * (models - bottoms)
        for f, cut in enumerate(cuts):
            if (step + 1) % how.every == f * how.every // how.fragments:
                in_the_air.setdefault(step + how.tau, []).append((cut, anchor[cut] - models[:, cut].mean(0)))
        for cut, delta in in_the_air.pop(step, []):
            speed[cut] = how.momentum * speed[cut] + delta
            anchor[cut] -= how.lr * (delta + how.momentum * speed[cut])
            models[:, cut] = how.mix * models[:, cut] + (1 - how.mix) * anchor[cut]
    return anchor, models


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_streaming_diloco_equals_its_recomputation(tau: int) -> None:
    how = StreamingDiloco(every=4, fragments=3, tau=tau, lr=0.7, momentum=0.6, mix=0.25)
    results = stream(how, steps=25)
    anchors = [torch.cat([state["anchor"] for state in states]) for _, states, _ in results]
    assert all(torch.equal(anchors[0], other) for other in anchors)
    expected, models = stream_by_hand(how, steps=25)
    assert close(anchors[0], expected)
    for me, (model, _, _) in enumerate(results):
        assert close(model, models[me])
    assert not torch.equal(results[0][0], results[1][0])  # between exchanges only the outer models agree


def test_streaming_diloco_enters_tau_steps_late() -> None:
    alone = stream(StreamingDiloco(every=100), steps=8)
    late = stream(StreamingDiloco(every=4, tau=3), steps=8)  # leaves after step 3, enters after step 6
    for (_, _, free), (_, _, path) in zip(alone, late, strict=True):
        assert [torch.equal(a, b) for a, b in zip(free, path, strict=True)] == [True] * 6 + [False] * 2
    mean_then = total([free[3] for _, _, free in alone]) / 4
    assert all(close(path[6], mean_then) for _, _, path in late)


def test_streaming_diloco_staggers_its_fragments() -> None:
    how = StreamingDiloco(every=6, fragments=3, tau=2)
    starts = [(step, e.fragment, e.finish_step) for step in range(12) for e in how.due(step)]
    assert starts == [(1, 1, 3), (3, 2, 5), (5, 0, 7), (7, 1, 9), (9, 2, 11), (11, 0, 13)]


def test_streaming_diloco_is_mean_sgd_at_its_plainest() -> None:
    expected, mean_bottom = torch.zeros(6, dtype=torch.float64), bowls(4).mean(0)
    for _ in range(20):
        expected = expected - INNER_LR * STRETCH * (expected - mean_bottom)
    results = stream(StreamingDiloco(), steps=20)
    assert all(torch.equal(results[0][0], model) and close(model, expected) for model, _, _ in results)


# --- 4. AD-PSGD: swaps with whoever responds ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AdPsgd(Optimization):
    """Active workers average with passive neighbours, who answer whenever asked [Lian et al. 2018, alg. 1].

    Gap: who the partner is belongs to a topology (a bipartite graph), but `Topology` only lowers collectives.
    """

    def due(self, step: int) -> tuple[Exchange, ...]:
        return (Exchange(what="model", finish_step=step),)

    def merge(self, mine: Tensor, theirs: Tensor, state: Outer) -> tuple[Tensor, Outer]:
        return (mine + theirs) / 2, state


@dataclass
class Model:
    """What a worker and its responder share. Values are replaced, never written into."""

    value: Tensor
    moved: Tensor
    """All that local steps have added."""

    def descend(self, slope: Tensor, lr: float) -> None:
        self.value, self.moved = self.value - lr * slope, self.moved - lr * slope


@dataclass
class Ledger:
    """What swaps did to both sides: by asker, what the responder's model gained; then what both gained."""

    open: dict[int, Tensor]
    closed: list[Tensor]


def gossip_actively(
    model: Model, me: int, partners: Sequence[int], conductor: int, lr: float, ledger: Ledger
) -> Flow[None]:
    """A worker that asks: the gradient is taken before the swap and applied after, as in the paper."""
    how = AdPsgd()
    for step, partner in enumerate(partners):
        yield Recv(conductor, ())
        slope = model.value
        for _ in how.due(step):
            before = model.value
            (theirs,) = yield Swap(partner, (before,))
            model.value, _ = how.merge(model.value, theirs, {})
            ledger.closed.append(ledger.open.pop(me) + model.value - before)
        model.descend(slope, lr)
        yield Send(conductor, ())


def gossip_passively(model: Model, steps: int, conductor: int, lr: float) -> Flow[None]:
    """A worker that is asked: it never speaks, its responder does."""
    for _ in range(steps):
        yield Recv(conductor, ())
        model.descend(model.value, lr)
        yield Send(conductor, ())


def respond(model: Model, ledger: Ledger) -> Flow[None]:
    while (request := (yield Serve())) is not None:
        sender, swap = request
        mine = model.value
        model.value, _ = AdPsgd().merge(mine, swap.payload[0], {})
        ledger.open[sender] = model.value - mine
        yield Reply(sender, (mine,))


def gossip(
    seed: int, *, steps: int, lr: float, active: range, passive: range
) -> tuple[list[Model], Tensor, list[Tensor]]:
    """Workers, responders and a conductor, numbered by the seed, since loopback lets low numbers go first.

    Returns the models, what they were, and what each swap added to the sum of its two.
    """
    rng = random.Random(seed)
    workers = max(*active, *passive) + 1
    first = normal(workers, 3, rng=torch.Generator().manual_seed(seed))
    models = [Model(row, torch.zeros_like(row)) for row in first]
    number = list(range(workers + len(passive) + 1))
    rng.shuffle(number)
    conductor, responder = number[-1], {w: number[workers + i] for i, w in enumerate(passive)}
    turns = [number[worker] for worker in range(workers) for _ in range(steps)]
    rng.shuffle(turns)
    ledger = Ledger({}, [])
    flows: dict[int, Flow[None]] = {conductor: conduct(turns, at_once=workers)}
    for w, model in enumerate(models):
        if w in active:
            partners = [responder[rng.choice([p for p in passive if p != w])] for _ in range(steps)]
            flows[number[w]] = gossip_actively(model, number[w], partners, conductor, lr, ledger)
        else:
            flows[number[w]] = gossip_passively(model, steps, conductor, lr)
    flows |= {responder[w]: respond(models[w], ledger) for w in passive}
    loopback.run([flows[actor] for actor in sorted(flows)])
    return models, first, ledger.closed


@pytest.mark.parametrize("seed", range(8))
def test_ad_psgd_conserves_and_contracts(seed: int) -> None:
    models, first, swaps = gossip(seed, steps=40, lr=0.0, active=range(3), passive=range(3, 6))
    assert len(swaps) == 3 * 40 and all(close(gain, torch.zeros_like(gain)) for gain in swaps)
    assert close(total([model.value for model in models]), first.sum(0))
    assert all(close(model.value, first.mean(0), atol=1e-4) for model in models)


def test_ad_psgd_leaves_both_sides_with_their_average() -> None:
    models, first, _ = gossip(0, steps=1, lr=0.0, active=range(1), passive=range(1, 2))
    assert all(torch.equal(model.value, first.sum(0) / 2) for model in models)


@pytest.mark.parametrize("seed", range(8))
def test_ad_psgd_moves_only_by_local_steps(seed: int) -> None:
    models, first, _ = gossip(seed, steps=20, lr=0.1, active=range(2), passive=range(2, 5))
    last = total([model.value for model in models])
    assert close(last, first.sum(0) + total([model.moved for model in models]))
    assert last.norm() < 0.3 * first.sum(0).norm()


def test_ad_psgd_needs_a_bipartite_graph() -> None:
    """Where those who ask are also asked, a swap may meet a model that is in a swap: the sum drifts."""
    drifts = []
    for seed in range(8):
        models, first, _ = gossip(seed, steps=10, lr=0.0, active=range(4), passive=range(4))
        drifts.append((total([model.value for model in models]) - first.sum(0)).abs().max())
    assert max(drifts) > 1e-2


def test_swaps_without_responders_are_named_as_stuck() -> None:
    def ask(to: int) -> Flow[None]:
        yield Swap(to, (torch.zeros(1),))

    with pytest.raises(WeftError, match="Swap"):
        loopback.run([ask(1), ask(0)])


# --- 5. Two phases: payloads that cannot be summed, and owners who can open them ----------------------------


@dataclass(frozen=True, kw_only=True)
class TwoPhaseSign(Compressor):
    """Signs and a scale for each owner's part; the owner opens, adds, encodes again [Tang et al. 2021].

    Parameters are cut among the owners one by one, so buckets change nothing. Where account is kept, it is
    kept on both sides: by the worker in `owed`, by the owner in `state[name]["owner"]`.
    """

    def exchange(self, bucket: Bucket, state: Memory, ctx: Context) -> Flow[Memory]:
        n, me = ctx.workers, ctx.rank
        grids = [grid(piece.grad, n) for piece in bucket.pieces]
        codes = [encode(values, real) for values, real in grids]
        for piece, (values, real), code in zip(bucket.pieces, grids, codes, strict=True):
            if piece.owed is not None:
                piece.owed.copy_((values - decode(code, real)).flatten()[: piece.spec.numel])
        got = yield Scatter([packed([(bits[o], scales[o]) for bits, scales in codes]) for o in range(n)])
        mine = []
        for i, (piece, (_, real)) in enumerate(zip(bucket.pieces, grids, strict=True)):
            due = total([decode(unpacked(payload, grids)[i], real[me]) for payload in got])
            memory = state.setdefault(piece.spec.name, {})
            if piece.owed is not None and "owner" in memory:
                due += memory["owner"]
            mine.append(encode(due, real[me]))
            if piece.owed is not None:
                memory["owner"] = due - decode(mine[i], real[me])
        owners = yield All(packed(mine))
        for i, (piece, (_, real)) in enumerate(zip(bucket.pieces, grids, strict=True)):
            rows = [decode(unpacked(payload, grids)[i], real[o]) for o, payload in enumerate(owners)]
            piece.mean.copy_(torch.cat(rows)[: piece.spec.numel])
        return state

    def rounds(self, specs: Sequence[Spec]) -> tuple[Round, ...]:
        raise NotImplementedError("Gap: an owner's part is 1/n of a parameter, and `rounds` is not told n")

    def rounds_among(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        """What `rounds` would say if it knew the number of workers."""
        widths = [math.ceil(spec.numel / workers) for spec in specs]
        part = sum(math.ceil(w / 8) + spec.dtype.itemsize for w, spec in zip(widths, specs, strict=True))
        return Round(Scatter, workers * part), Round(All, part)


Code = tuple[Tensor, Tensor]
"""Packed signs and scales."""


def grid(flat: Tensor, owners: int) -> tuple[Tensor, Tensor]:
    """One row per owner, filled up with zeros to equal rows; and which places are real."""
    missing = -flat.numel() % owners
    values, real = (pad(tensor, (0, missing)).view(owners, -1) for tensor in (flat, torch.ones_like(flat)))
    return values, real


def encode(values: Tensor, real: Tensor) -> Code:
    """Per row: the mean magnitude of the real places, and one bit per place."""
    scales = (values * real).abs().sum(-1) / real.sum(-1).clamp(min=1)
    bits = pad((values >= 0).int(), (0, -values.shape[-1] % 8)).view(*values.shape[:-1], -1, 8)
    return (bits << torch.arange(8)).sum(-1).to(torch.uint8), scales


def decode(code: Code, real: Tensor) -> Tensor:
    bits, scales = code
    signs = (bits.int().unsqueeze(-1) >> torch.arange(8) & 1).flatten(-2)[..., : real.shape[-1]] * 2 - 1
    return signs * scales.unsqueeze(-1) * real


def packed(codes: Sequence[Code]) -> Payload:
    return torch.cat([bits for bits, _ in codes]), torch.stack([scale for _, scale in codes])


def unpacked(payload: Payload, grids: Sequence[tuple[Tensor, Tensor]]) -> list[Code]:
    bits, scales = payload
    cut = torch.split(bits, [math.ceil(values.shape[1] / 8) for values, _ in grids])
    return list(zip(cut, scales, strict=True))


@dataclass(frozen=True, kw_only=True)
class SignToAll(Compressor):
    """The same code in one phase, for comparison: everyone gets everyone's."""

    def exchange(self, bucket: Bucket, state: Memory, ctx: Context) -> Flow[Memory]:
        grids = [grid(piece.grad, 1) for piece in bucket.pieces]
        got = yield All(packed([(bits[0], scales[0]) for bits, scales in (encode(*g) for g in grids)]))
        for i, (piece, (_, real)) in enumerate(zip(bucket.pieces, grids, strict=True)):
            piece.mean.copy_(total([decode(unpacked(payload, grids)[i], real[0]) for payload in got]))
        return state

    def rounds(self, specs: Sequence[Spec]) -> tuple[Round, ...]:
        return (Round(All, sum(math.ceil(spec.numel / 8) + spec.dtype.itemsize for spec in specs)),)


@everywhere
@crowds
def test_two_phases_lose_nothing_on_either_side(topology: Topology | None, workers: int) -> None:
    crowd, bare = (Crowd(ErrorFeedback(inner=TwoPhaseSign()), workers, where) for where in (topology, None))
    before = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(4):
        grads = draw(workers, seed=step)
        means = crowd.exchange(grads)
        assert_replicas_agree([*means, *bare.exchange(grads)])  # only owners sum: no topology changes a bit
        expected = TwoPhaseSign().rounds_among(specs_of(grads[0]), workers)
        assert all(tuple(log) == expected for log in crowd.rounds)
        for name, shape in SHAPES.items():
            given = total([grad[name] for grad in grads]) + before[name]
            owners = torch.cat(crowd.kept(name, "owner"))
            owners, filling = owners[: given.numel()], owners[given.numel() :]
            assert owners.any() and not filling.any()
            before[name] = (total(crowd.kept(name, "owed")) + owners).view(shape)
            assert close(given, means[0][name] + before[name])


@crowds
def test_two_phases_reach_the_mean_over_time(workers: int) -> None:
    crowd, grads, steps = Crowd(ErrorFeedback(inner=TwoPhaseSign()), workers), draw(workers, seed=11), 100
    applied = total([crowd.exchange(grads)[0]["linear"] for _ in range(steps)]) / steps
    target = total([grad["linear"] for grad in grads])
    assert (applied - target).norm() < 0.1 * target.norm()
    bare = Crowd(TwoPhaseSign(), workers)
    assert (bare.exchange(grads)[0]["linear"] - target).norm() > 0.3 * target.norm()
    assert not bare.kept("linear", "owner")  # bare answers never carry error feedback


def test_two_phases_send_as_much_among_many_as_among_few() -> None:
    def sent(compressor: Compressor, workers: int) -> int:
        crowd = Crowd(compressor, workers, Direct())
        crowd.exchange([{"wide": torch.randn(8192)} for _ in range(workers)])
        return max(crowd.sent_bytes)

    code = 8192 // 8
    for workers in (2, 4, 8, 16):
        assert sent(SignToAll(), workers) == (workers - 1) * (code + 4)
        assert sent(TwoPhaseSign(), workers) == 2 * (workers - 1) * (code // workers + 4) < 2.2 * code


def test_rounds_of_two_phases_cannot_be_said_yet() -> None:
    """To be turned round when `rounds` is told the number of workers."""
    with pytest.raises(NotImplementedError, match="n"):
        TwoPhaseSign().rounds([Spec("w", (8, 8))])
