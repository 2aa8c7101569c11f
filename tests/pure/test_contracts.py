"""The contracts are rich enough: five techniques that do not ship, sketched as answers and run on loopback.

No interpreter in `transport/` knows any of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
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
from weft.ops import All, Flow, Place, Pull, Push, Recv, Reply, Round, Scatter, Send, Serve, Spec, Sum, Swap, nbytes
from weft.optimization import Exchange, Optimization
from weft.optimization import State as Outer
from weft.synchrony import Synchrony, View
from weft.synchrony.asp import Asp
from weft.topology import Topology
from weft.topology.direct import Direct
from weft.transport import loopback, virtual

KINDS = {name: kind for name, kind in catalogue("topology").items() if issubclass(kind, Topology) and kind.everyone}
TOPOLOGIES: dict[str, Any] = {"bare": None, **{name: make(kind, {}) for name, kind in KINDS.items()}}
everywhere = pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
crowds = pytest.mark.parametrize("workers", [2, 3, 4])
SHAPES = {"linear": (7, 5), "bias": (7,), "conv": (4, 3, 2, 2)}
Grads = dict[str, Tensor]


# --- the bench ------------------------------------------------------------------------------------------------------


def watched(flow: Flow[Any], rounds: list[Round]) -> Flow[Any]:
    """The same flow: its collectives are noted as sizes, and what it receives must be as announced."""
    result: Any = None
    while True:
        try:
            op = flow.send(result)
        except StopIteration as stop:
            return stop.value
        result = yield op
        match op:
            case Sum(tensor):
                rounds.append(Round(Sum, nbytes((tensor,))))
            case All(payload):
                rounds.append(Round(All, nbytes(payload)))
            case Scatter(parts):
                rounds.append(Round(Scatter, sum(map(nbytes, parts))))
            case Recv(_, like):  # a real transport allocates by it
                assert [(t.shape, t.dtype) for t in result] == [(t.shape, t.dtype) for t in like]


class Crowd:
    """Workers with one compressor's state each, who exchange gradients through a topology (None: bare)."""

    def __init__(self, compressor: Compressor, workers: int, topology: Topology | None = None) -> None:
        self.compressor, self.place, self.topology = compressor, Place(workers=workers), topology
        self.states: list[Memory] = [{} for _ in range(workers)]
        self.sent_bytes: list[int] = []
        self.step = 0

    def exchange(self, grads: Sequence[Grads]) -> Grads:
        """One exchange of one bucket, in the declared rounds; returns the means, which all replicas share."""
        means, flows, n = [], [], self.place.workers
        rounds: list[list[Round]] = [[] for _ in grads]
        specs = [Spec(name, tuple(grad.shape), grad.dtype) for name, grad in grads[0].items()]
        for me, mine in enumerate(grads):
            flat = {name: grad.flatten().clone() for name, grad in mine.items()}
            # The hardest case: `mean` is `grad`'s memory.
            bucket = Bucket(tuple(Piece(spec, flat[spec.name], flat[spec.name]) for spec in specs))
            ctx = Context(step=self.step, rank=me, workers=n)
            flow = watched(self.compressor.exchange(bucket, self.states[me], ctx), rounds[me])
            if self.topology is not None:
                flow = watched(loopback.lowered(flow, self.topology, me, self.place), rounds[me])
            flows.append(flow)
            means.append({spec.name: flat[spec.name].view(spec.shape) for spec in specs})
        if self.topology is None:
            self.states = loopback.run(flows)
        else:
            outcome = virtual.run(flows, self.place)
            self.states, self.sent_bytes = outcome.results, outcome.sent_bytes
        self.step += 1
        assert all(tuple(noted) == self.compressor.rounds(specs, n) for noted in rounds)
        assert all(same(means[0], other) for other in means)
        return means[0]

    def kept(self, name: str, key: str) -> list[Tensor]:
        """What each worker's state holds for a parameter."""
        return [state[name][key] for state in self.states if key in state.get(name, {})]

    def owed(self, name: str) -> Tensor:
        """All that was given and not yet applied: what workers owe, and what owners of parts do."""
        owed = total(self.kept(name, "owed"))
        owners = torch.cat([torch.zeros(0), *self.kept(name, "owner")])
        assert not owners[owed.numel() :].any()  # filling
        return (owed + owners[: owed.numel()] if owners.numel() else owed).view(SHAPES[name])

    def settle(self) -> list[Grads]:
        """Some steps in which nothing is lost: given + owed before = mean + owed after. Returns their means."""
        before, history = {name: torch.zeros(shape) for name, shape in SHAPES.items()}, []
        for step in range(4):
            grads = draw(self.place.workers, seed=step)
            history.append(self.exchange(grads))
            for name in SHAPES:
                given = total([grad[name] for grad in grads]) + before[name]
                before[name] = self.owed(name)
                assert close(given, history[-1][name] + before[name])
        return history


def draw(workers: int, seed: int) -> list[Grads]:
    """Random gradients in float64, weighted by the workers' uneven shares."""
    rng = torch.Generator().manual_seed(seed)
    shares = torch.rand(workers, generator=rng).double()
    return [{name: s * normal(*shape, rng=rng) for name, shape in SHAPES.items()} for s in shares / shares.sum()]


def normal(*shape: int, rng: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def total(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([*tensors]).sum(0)


def same(a: Grads, b: Grads) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def close(a: Tensor, b: Tensor, atol: float = 1e-12) -> bool:
    return torch.allclose(a, b, rtol=0, atol=atol)


def conduct(turns: Sequence[int], at_once: int) -> Flow[None]:
    """Gives turns, `at_once` at a time: loopback knows no time, so this makes workers fast and slow."""
    for i in range(0, len(turns), at_once):
        for actor in turns[i : i + at_once]:
            yield Send(actor, ())
        for actor in turns[i : i + at_once]:
            yield Recv(actor, ())


# --- 1. PowerSGD: two sums, shapes, a warm start --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PowerSgd(Compressor):
    """Each matrix as a product of two thin ones, by a warm power iteration [Vogels et al. 2019, alg. 1].

    P = M Q is summed and orthogonalised, then Q = M'P is summed: linear in M, so sums of shares are means.
    """

    rank: int = 2

    def exchange(self, bucket: Bucket, state: Memory, ctx: Context) -> Flow[Memory]:
        pieces = [piece for piece in bucket.pieces if len(piece.spec.shape) > 1]
        vectors = [piece for piece in bucket.pieces if len(piece.spec.shape) <= 1]
        matrices = [piece.grad.view(piece.spec.shape[0], -1) for piece in pieces]
        tall = [m @ self._warm(piece, state, ctx) for m, piece in zip(matrices, pieces, strict=True)]
        sums = yield from added(tall + [piece.grad for piece in vectors])
        bases = [torch.linalg.qr(p).Q for p in sums[: len(tall)]]
        mine = [m.T @ basis for m, basis in zip(matrices, bases, strict=True)]
        wide = yield from added(mine)
        for piece, m, basis, own, q in zip(pieces, matrices, bases, mine, wide, strict=True):
            if piece.owed is not None:  # before `mean` is written: the three may share memory
                piece.owed.copy_((m - basis @ own.T).flatten())
            piece.mean.copy_((basis @ q.T).flatten())
            state[piece.spec.name]["q"] = q.clone()
        for piece, mean in zip(vectors, sums[len(tall) :], strict=True):
            if piece.owed is not None:
                piece.owed.zero_()
            piece.mean.copy_(mean)
        return state

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        sides = [(spec.dtype.itemsize, *self._sides(spec)) for spec in specs if len(spec.shape) > 1]
        first = sum(size * rows * r for size, rows, _, r in sides)
        first += sum(spec.nbytes for spec in specs if len(spec.shape) <= 1)
        second = sum(size * cols * r for size, _, cols, r in sides)
        return (Round(Sum, first), Round(Sum, second)) if sides else (Round(Sum, first),)

    def _sides(self, spec: Spec) -> tuple[int, int, int]:
        rows, cols = spec.shape[0], spec.numel // spec.shape[0]
        return rows, cols, min(self.rank, rows, cols)

    def _warm(self, piece: Piece, state: Memory, ctx: Context) -> Tensor:
        memory = state.setdefault(piece.spec.name, {})
        if "q" not in memory:
            _, cols, r = self._sides(piece.spec)
            q = torch.randn(cols, r, generator=ctx.generator(piece.spec.name, shared=True))
            memory["q"] = q.to(piece.grad)
        return memory["q"]


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
    crowd.settle()
    assert crowd.owed("linear").norm() > 0.1 and not crowd.owed("bias").any()


@everywhere
@crowds
def test_powersgd_is_exact_where_the_mean_has_its_rank(topology: Topology | None, workers: int) -> None:
    """Each worker's matrix has full rank, the mean has rank 2: exact only if all multiply by the same Q."""
    crowd, rng = Crowd(PowerSgd(rank=3), workers, topology), torch.Generator().manual_seed(1)
    for _ in range(3):  # the second and third steps start warm, from another matrix's Q
        mean, noise = normal(7, 2, rng=rng) @ normal(2, 5, rng=rng), normal(workers, 7, 5, rng=rng)
        shares = mean / workers + noise - noise.mean(0)
        assert close(crowd.exchange([{"linear": share} for share in shares])["linear"], mean, atol=1e-10)


def test_powersgd_warms_up_to_the_best_approximation() -> None:
    grads, crowd = draw(2, seed=7), Crowd(PowerSgd(rank=2), 2)
    target = total([grad["linear"] for grad in grads])
    best = torch.linalg.svdvals(target)[2:].norm()  # what any rank 2 must miss [Eckart & Young 1936]
    misses = [(crowd.exchange(grads)["linear"] - target).norm() for _ in range(200)]
    assert misses[-1] < best * (1 + 1e-6) < misses[0]


# --- 2. DC-ASGD: a server that makes late gradients fit -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DcAsgd(Synchrony):
    """Asynchronous; a late gradient is moved to the model now by g g, a cheap Hessian [Zheng et al. 2017].

    Their adaptive variant would also need a running mean of g g, but `correct` has no state.
    """

    everyone: ClassVar[bool] = False
    lam: float = 0.0

    def may_start(self, me: int, view: View) -> bool:
        return True

    def quorum(self, view: View) -> int:
        return 1

    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        return grad + self.lam * grad * grad * (now - read)


LR = 0.1
TARGETS = torch.linspace(-2, 2, 12).double().view(4, 3)
Event = tuple[type, int]


def slope(model: Tensor, target: Tensor) -> Tensor:
    return torch.sin(model) + (model - target)


def serve(how: Synchrony, workers: int, log: list[Event]) -> Flow[Tensor]:
    """A server of any synchrony: it keeps what each worker read, and steps whenever a quorum has come in."""
    model, version, clocks = torch.ones(3).double(), 0, [0] * workers
    read: dict[int, tuple[Tensor, int]] = {}
    waiting: list[Tensor] = []
    while (request := (yield Serve())) is not None:
        sender, ask = request
        log.append((type(ask), sender))
        if isinstance(ask, Pull):
            read[sender] = model, version
            yield Reply(sender, (model,))
            continue
        then, since = read[sender]
        grad = how.correct(ask.payload[0], model, then, version - since)
        clocks[sender] += 1
        waiting += [] if grad is None else [grad]
        if len(waiting) >= how.quorum(View(clocks=tuple(clocks))):
            model, version = model - LR * total(waiting), version + 1
            waiting.clear()
        yield Reply(sender, (torch.tensor(grad is not None),))
    return model


def train_with_server(how: Synchrony, seed: int, steps: int = 6) -> tuple[Tensor, list[Event]]:
    """Four workers, a server (4) and a conductor (5): the last model, and what reached the server."""

    def ask(target: Tensor) -> Flow[None]:
        """A worker: pull in one turn, compute and push in the next."""
        for _ in range(steps):
            yield Recv(5, ())
            (model,) = yield Pull(4)
            yield Send(5, ())
            yield Recv(5, ())
            (accepted,) = yield Push(4, (slope(model, target),))
            yield Send(5, ())
            assert accepted

    log: list[Event] = []
    turns = random.Random(seed).sample([*range(4)] * 2 * steps, 8 * steps)
    return loopback.run([*map(ask, TARGETS), serve(how, 4, log), conduct(turns, at_once=1)])[4], log


def replay(log: Sequence[Event], lam: float) -> tuple[Tensor, int]:
    """The same arrivals in one loop, by the paper's formula: the model and the greatest staleness."""
    model, backup, since, pushes, stalest = torch.ones(3).double(), {}, {}, 0, 0
    for kind, worker in log:
        if kind is Pull:
            backup[worker], since[worker] = model.clone(), pushes
        else:
            g = slope(backup[worker], TARGETS[worker])
            model = model - LR * (g + lam * g * g * (model - backup[worker]))
            stalest, pushes = max(stalest, pushes - since[worker]), pushes + 1
    return model, stalest


@pytest.mark.parametrize("seed", range(5))
def test_dc_asgd_equals_its_sequential_recomputation(seed: int) -> None:
    model, log = train_with_server(DcAsgd(lam=0.5), seed)
    expected, stalest = replay(log, lam=0.5)
    assert len(log) == 2 * 4 * 6 and stalest >= 4
    assert close(model, expected) and not close(model, replay(log, lam=0.0)[0], atol=1e-3)


def test_dc_asgd_without_compensation_is_asgd() -> None:
    (plain, log), (compensated, same_log) = (train_with_server(how, seed=3) for how in (Asp(), DcAsgd(lam=0.0)))
    assert log == same_log and torch.equal(plain, compensated)


def test_dc_asgd_makes_late_gradients_fit() -> None:
    read, now = torch.tensor([2.0]), torch.tensor([2.2])
    late, fresh = -1 / read, -1 / now  # of -log x, whose second derivative is its slope squared
    fitted = DcAsgd(lam=1.0).correct(late, now, read, staleness=1)
    assert fitted is not None and (fitted - fresh).abs() < 0.2 * (late - fresh).abs()


# --- 3. Streaming DiLoCo: fragments that leave now and arrive later -------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StreamingDiloco(Optimization):
    """Fragments take turns; outer Nesterov on the mean delta, tau steps late [Douillard et al. 2025, alg. 2]."""

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


RATES = LR * torch.tensor([1.0, 0.7, 0.4, 1.3, 0.9, 0.6]).double()
BOTTOMS = normal(4, 6, rng=torch.Generator().manual_seed(5))
"""One quadratic bowl per worker: where its bottom is."""


def stream(how: StreamingDiloco, steps: int) -> tuple[Tensor, Tensor]:
    """Every worker's anchor, and its model after each step.

    Actors 0..n-1 are the workers' carriers, so that a topology can number them; n..2n-1 are the workers.
    """
    n = len(BOTTOMS)

    def carry(me: int) -> Flow[None]:
        """It sums deltas while its worker goes on."""
        like = torch.zeros(6).double().tensor_split(how.fragments)
        for exchange in (exchange for step in range(steps) for exchange in how.due(step)):
            (delta,) = yield Recv(n + me, (like[exchange.fragment],))
            mean = yield Sum(delta)
            yield Send(n + me, (mean,))

    def walk(me: int) -> Flow[tuple[Tensor, Tensor]]:
        """Inner steps; deltas go to the carrier when due and are fetched when they must enter."""
        model, path, under_way = torch.zeros(6).double(), [], []
        parts = model.tensor_split(how.fragments)
        states: list[Outer] = [{"anchor": part.clone()} for part in parts]
        for step in range(steps):
            model -= RATES * (model - BOTTOMS[me])
            for exchange in how.due(step):
                yield Send(me, ((states[exchange.fragment]["anchor"] - parts[exchange.fragment]) / n,))
                under_way.append(exchange)
            while under_way and under_way[0].finish_step <= step:
                f = under_way.pop(0).fragment
                (theirs,) = yield Recv(me, (parts[f],))
                merged, states[f] = how.merge(parts[f], theirs, states[f])
                parts[f].copy_(merged)
            path.append(model.clone())
        return torch.cat([state["anchor"] for state in states]), torch.stack(path)

    carriers = [loopback.lowered(carry(me), Direct(), me, Place(workers=n)) for me in range(n)]
    anchors, paths = zip(*loopback.run([*carriers, *map(walk, range(n))])[n:], strict=True)
    return torch.stack(anchors), torch.stack(paths)


def stream_by_hand(how: StreamingDiloco, steps: int) -> tuple[Tensor, Tensor]:
    """The algorithm over all workers at once, in arrays: returns the anchor and every worker's model."""
    anchor, speed, models = torch.zeros(6).double(), torch.zeros(6).double(), torch.zeros(4, 6).double()
    in_the_air: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for step in range(steps):
        models = models - RATES * (models - BOTTOMS)
        for f, cut in enumerate(torch.arange(6).tensor_split(how.fragments)):
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
    (anchors, paths), (anchor, models) = stream(how, steps=25), stream_by_hand(how, steps=25)
    assert (anchors == anchors[0]).all() and close(anchors[0], anchor)
    assert close(paths[:, -1], models)
    assert not torch.equal(paths[0, -1], paths[1, -1])  # between exchanges only the outer models agree


def test_streaming_diloco_enters_tau_steps_late() -> None:
    _, alone = stream(StreamingDiloco(every=100), steps=8)
    _, late = stream(StreamingDiloco(every=4, tau=3), steps=8)  # leaves after step 3, enters after step 6
    assert (alone == late).all(-1).tolist() == [[True] * 6 + [False] * 2] * 4
    assert close(late[:, 6], alone[:, 3].mean(0).expand(4, 6))


def test_streaming_diloco_staggers_its_fragments() -> None:
    how = StreamingDiloco(every=6, fragments=3, tau=2)
    starts = [(step, e.fragment, e.finish_step) for step in range(12) for e in how.due(step)]
    assert starts == [(1, 1, 3), (3, 2, 5), (5, 0, 7), (7, 1, 9), (9, 2, 11), (11, 0, 13)]


def test_streaming_diloco_is_mean_sgd_at_its_plainest() -> None:
    expected = torch.zeros(6).double()
    for _ in range(20):
        expected = expected - RATES * (expected - BOTTOMS.mean(0))
    last = stream(StreamingDiloco(), steps=20)[1][:, -1]
    assert (last == last[0]).all() and close(last[0], expected)


# --- 4. AD-PSGD: swaps with whoever responds ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AdPsgd(Optimization):
    """Active workers average with passive neighbours, who answer whenever asked [Lian et al. 2018, alg. 1].

    Who the partner is belongs to a topology (a bipartite graph), so whoever drives this has to choose it.
    """

    def due(self, step: int) -> tuple[Exchange, ...]:
        return (Exchange(what="model", finish_step=step),)

    def merge(self, mine: Tensor, theirs: Tensor, state: Outer) -> tuple[Tensor, Outer]:
        return (mine + theirs) / 2, state


@dataclass
class Gossip:
    """Models (replaced, never written into), what they were, what local steps added, what each swap added to its two."""

    models: list[Tensor]
    first: Tensor
    moved: Tensor
    swaps: list[Tensor]


def gossip(seed: int, *, steps: int, lr: float, active: range, passive: range) -> Gossip:
    """Workers, responders and a conductor, numbered by the seed, since loopback lets low numbers go first."""
    how, rng, workers = AdPsgd(), random.Random(seed), max(*active, *passive) + 1
    first = normal(workers, 3, rng=torch.Generator().manual_seed(seed))
    seen, gained = Gossip(list(first), first, torch.zeros(3).double(), []), {}
    actors = workers + len(passive) + 1
    number = rng.sample(range(actors), actors)
    conductor, responder = number[-1], {w: number[workers + i] for i, w in enumerate(passive)}

    def work(w: int) -> Flow[None]:
        """Whoever is active asks; the gradient is taken before the swap and applied after, as in the paper."""
        for step in range(steps):
            yield Recv(conductor, ())
            before = seen.models[w]
            for _ in how.due(step) if w in active else ():
                (theirs,) = yield Swap(responder[rng.choice([p for p in passive if p != w])], (before,))
                seen.models[w], _ = how.merge(seen.models[w], theirs, {})
                seen.swaps.append(gained.pop(number[w]) + seen.models[w] - before)
            seen.models[w] = seen.models[w] - lr * before
            seen.moved -= lr * before
            yield Send(conductor, ())

    def respond(w: int) -> Flow[None]:
        while (request := (yield Serve())) is not None:
            sender, swap = request
            mine = seen.models[w]
            seen.models[w], _ = how.merge(mine, swap.payload[0], {})
            gained[sender] = seen.models[w] - mine
            yield Reply(sender, (mine,))

    turns = rng.sample(number[:workers] * steps, workers * steps)
    flows = {conductor: conduct(turns, at_once=workers)}
    flows |= {number[w]: work(w) for w in range(workers)} | {responder[w]: respond(w) for w in passive}
    loopback.run([flows[actor] for actor in range(actors)])
    return seen


@pytest.mark.parametrize("seed", range(8))
def test_ad_psgd_conserves_and_contracts(seed: int) -> None:
    seen = gossip(seed, steps=40, lr=0.0, active=range(3), passive=range(3, 6))
    assert len(seen.swaps) == 3 * 40 and all(close(gain, torch.zeros_like(gain)) for gain in seen.swaps)
    assert close(total(seen.models), seen.first.sum(0))
    assert all(close(model, seen.first.mean(0), atol=1e-4) for model in seen.models)


def test_ad_psgd_leaves_both_sides_with_their_average() -> None:
    seen = gossip(0, steps=1, lr=0.0, active=range(1), passive=range(1, 2))
    assert all(torch.equal(model, seen.first.sum(0) / 2) for model in seen.models)


@pytest.mark.parametrize("seed", range(8))
def test_ad_psgd_moves_only_by_local_steps(seed: int) -> None:
    seen = gossip(seed, steps=20, lr=0.1, active=range(2), passive=range(2, 5))
    assert close(total(seen.models), seen.first.sum(0) + seen.moved)
    assert total(seen.models).norm() < 0.3 * seen.first.sum(0).norm()


def test_ad_psgd_needs_a_bipartite_graph() -> None:
    """Where those who ask are also asked, a swap may meet a model that is in a swap: the sum drifts."""
    runs = [gossip(seed, steps=10, lr=0.0, active=range(4), passive=range(4)) for seed in range(8)]
    assert max((total(seen.models) - seen.first.sum(0)).abs().max() for seen in runs) > 1e-2


def test_swaps_without_responders_are_named_as_stuck() -> None:
    def ask(to: int) -> Flow[None]:
        yield Swap(to, (torch.zeros(1),))

    with pytest.raises(WeftError, match="Swap"):
        loopback.run([ask(1), ask(0)])


# --- 5. Two phases: payloads that cannot be summed, and owners who can open them ------------------------------------


@dataclass(frozen=True, kw_only=True)
class TwoPhaseSign(Compressor):
    """Signs and a scale for each owner's part; the owner opens, adds, encodes again [Tang et al. 2021].

    Parameters are cut among the owners one by one, so buckets change nothing. Where account is kept, it is kept on
    both sides: by the worker in `owed`, by the owner in `state[name]["owner"]`.
    """

    def exchange(self, bucket: Bucket, state: Memory, ctx: Context) -> Flow[Memory]:
        n, me = ctx.workers, ctx.rank
        grids = [grid(piece.grad, n) for piece in bucket.pieces]
        codes = [encode(*cut) for cut in grids]
        for piece, (values, real), code in zip(bucket.pieces, grids, codes, strict=True):
            if piece.owed is not None:
                piece.owed.copy_((values - decode(code, real)).flatten()[: piece.spec.numel])
        got = yield Scatter([packed([(bits[o], scales[o]) for bits, scales in codes]) for o in range(n)])
        parts = zip(*(opened(payload, grids, me) for payload in got), strict=True)
        mine = []
        for piece, (_, real), part in zip(bucket.pieces, grids, parts, strict=True):
            memory, due = state.setdefault(piece.spec.name, {}), total(part)
            if piece.owed is not None and "owner" in memory:
                due += memory["owner"]
            mine.append(encode(due, real[me]))
            if piece.owed is not None:
                memory["owner"] = due - decode(mine[-1], real[me])
        owners = yield All(packed(mine))
        rows = zip(*(opened(payload, grids, o) for o, payload in enumerate(owners)), strict=True)
        for piece, row in zip(bucket.pieces, rows, strict=True):
            piece.mean.copy_(torch.cat(row)[: piece.spec.numel])
        return state

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        part = sum(math.ceil(math.ceil(spec.numel / workers) / 8) + spec.dtype.itemsize for spec in specs)
        return Round(Scatter, workers * part), Round(All, part)


Grid = tuple[Tensor, Tensor]
"""One row of values per owner, filled up with zeros to equal rows; and which places are real."""
Code = tuple[Tensor, Tensor]
"""Packed signs and scales."""


def grid(flat: Tensor, owners: int) -> Grid:
    values, real = (pad(t, (0, -t.numel() % owners)).view(owners, -1) for t in (flat, torch.ones_like(flat)))
    return values, real


def encode(values: Tensor, real: Tensor) -> Code:
    """Per row: one bit per place, and the mean magnitude of the real places."""
    scales = (values * real).abs().sum(-1) / real.sum(-1).clamp(min=1)
    bits = pad((values >= 0).int(), (0, -values.shape[-1] % 8)).view(*values.shape[:-1], -1, 8)
    return (bits << torch.arange(8)).sum(-1).to(torch.uint8), scales


def decode(code: Code, real: Tensor) -> Tensor:
    bits, scales = code
    signs = (bits.int().unsqueeze(-1) >> torch.arange(8) & 1).flatten(-2)[..., : real.shape[-1]] * 2 - 1
    return signs * scales.unsqueeze(-1) * real


def packed(codes: Sequence[Code]) -> Code:
    return torch.cat([bits for bits, _ in codes]), torch.stack([scale for _, scale in codes])


def opened(payload: Code, grids: Sequence[Grid], owner: int) -> list[Tensor]:
    """The owner's row of every parameter."""
    cut = payload[0].split([math.ceil(values.shape[1] / 8) for values, _ in grids])
    return [decode(code, real[owner]) for *code, (_, real) in zip(cut, payload[1], grids, strict=True)]


@everywhere
@crowds
def test_two_phases_lose_nothing_on_either_side(topology: Topology | None, workers: int) -> None:
    crowd, bare = (Crowd(ErrorFeedback(inner=TwoPhaseSign()), workers, where) for where in (topology, None))
    assert all(map(same, crowd.settle(), bare.settle()))  # only owners sum: no topology changes a bit
    assert all(torch.cat(crowd.kept(name, "owner")).any() for name in SHAPES)


@crowds
def test_two_phases_reach_the_mean_over_time(workers: int) -> None:
    crowd, grads, steps = Crowd(ErrorFeedback(inner=TwoPhaseSign()), workers), draw(workers, seed=11), 100
    applied = total([crowd.exchange(grads)["linear"] for _ in range(steps)]) / steps
    target = total([grad["linear"] for grad in grads])
    assert (applied - target).norm() < 0.1 * target.norm()
    bare = Crowd(TwoPhaseSign(), workers)
    assert (bare.exchange(grads)["linear"] - target).norm() > 0.3 * target.norm()
    assert not bare.kept("linear", "owner")  # bare answers never carry error feedback


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_two_phases_send_what_their_rounds_say_and_no_more_among_many(workers: int) -> None:
    crowd, code = Crowd(TwoPhaseSign(), workers, Direct()), 8192 // 8
    crowd.exchange([{"wide": torch.ones(8192)}] * workers)
    said = crowd.compressor.rounds([Spec("wide", (8192,))], workers)
    assert said == (Round(Scatter, code + 4 * workers), Round(All, code // workers + 4))
    sent = 2 * (workers - 1) * (code // workers + 4)
    assert set(crowd.sent_bytes) == {sent} == {sum(Direct().wire_bytes(r.op, r.nbytes, workers) for r in said)}
    assert sent < 2.2 * code  # in one phase, everyone's code to everyone: (workers - 1) * (code + 4)


@pytest.mark.parametrize("topology", [None, Direct()], ids=["bare", "direct"])
@pytest.mark.parametrize("inner", [PowerSgd(), TwoPhaseSign()], ids=["powersgd", "two_phases"])
def test_buckets_change_nothing(inner: Compressor, topology: Topology | None) -> None:
    together, *apart = (Crowd(ErrorFeedback(inner=inner), 3, topology) for _ in range(1 + len(SHAPES)))
    for step in range(3):
        grads = draw(3, seed=step)
        whole = together.exchange(grads)
        for name, crowd in zip(SHAPES, apart, strict=True):
            assert same(crowd.exchange([{name: grad[name]} for grad in grads]), {name: whole[name]})
