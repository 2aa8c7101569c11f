"""The contracts are rich enough: three techniques that do not ship, sketched as answers and run on loopback.

No interpreter in `transport/` knows any of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from weft.axis import catalogue, make
from weft.compression import Bucket, Compressor, Context, Piece
from weft.compression import State as Memory
from weft.errors import WeftError
from weft.ops import All, Flow, Place, Pull, Push, Recv, Reply, Round, Scatter, Send, Serve, Spec, Sum, Swap, nbytes
from weft.optimization import Exchange, Optimization, Side
from weft.optimization import State as Outer
from weft.synchrony import Synchrony, View
from weft.synchrony.asp import Asp
from weft.topology import CollectiveTopology
from weft.topology.direct import Direct
from weft.transport import loopback, virtual

KINDS = {name: kind for name, kind in catalogue("topology").items() if issubclass(kind, CollectiveTopology)}
TOPOLOGIES: dict[str, Any] = {"bare": None, **{name: make(kind, {}) for name, kind in KINDS.items()}}
everywhere = pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
crowds = pytest.mark.parametrize("workers", [2, 3, 4])
close = partial(torch.allclose, rtol=0, atol=1e-12)
SHAPES = {"linear": (7, 5), "bias": (7,), "conv": (4, 3, 2, 2)}
Grads = dict[str, Tensor]


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

    def __init__(self, compressor: Compressor, workers: int, topology: CollectiveTopology | None = None) -> None:
        self.compressor, self.place, self.topology, self.step = compressor, Place(workers=workers), topology, 0
        self.states: list[Memory] = [{} for _ in range(workers)]

    def exchange(self, grads: Sequence[Grads]) -> Grads:
        """One exchange of one bucket, in the declared rounds; returns the means, which are the same everywhere."""
        n, flows, rounds = self.place.workers, [], [[] for _ in grads]
        specs = [Spec(name, tuple(grad.shape), grad.dtype) for name, grad in grads[0].items()]
        means = [{name: grad.clone() for name, grad in mine.items()} for mine in grads]
        for me, mine in enumerate(means):
            flat = [(spec, mine[spec.name].view(-1)) for spec in specs]
            bucket = Bucket(tuple(Piece(spec, grad, grad) for spec, grad in flat))  # the hardest case: `mean` is `grad`
            flow = self.compressor.exchange(bucket, self.states[me], Context(step=self.step, rank=me, workers=n))
            flows.append(watched(flow, rounds[me]))
        if self.topology is None:
            self.states = loopback.run(flows)
        else:
            low = [loopback.lowered(flow, self.topology, me, self.place) for me, flow in enumerate(flows)]
            outcome = virtual.run([watched(flow, rounds[me]) for me, flow in enumerate(low)], self.place)
            self.states, self.sent_bytes = outcome.results, outcome.sent_bytes
        self.step += 1
        assert all(tuple(noted) == self.compressor.rounds(specs, n) for noted in rounds)
        assert all(same(means[0], other) for other in means)
        return means[0]

    def kept(self, name: str, key: str) -> list[Tensor]:
        return [state[name][key] for state in self.states if key in state.get(name, {})]

    def residual(self, name: str) -> Tensor:
        """All that was given and not yet applied: what workers owe, and what owners of parts do."""
        owners = self.kept(name, "owner")
        return (sum(self.kept(name, "residual")) + (torch.cat(owners) if owners else 0)).view(SHAPES[name])

    def settle(self) -> list[Grads]:
        """Four steps in which nothing is lost: given + owed before = mean + owed after. Returns their means."""
        residual, history = dict.fromkeys(SHAPES, 0), []
        for step in range(4):
            grads = draw(self.place.workers, seed=step)
            history.append(self.exchange(grads))
            for name in SHAPES:
                given, residual[name] = sum(grad[name] for grad in grads) + residual[name], self.residual(name)
                assert close(given, history[-1][name] + residual[name])
        return history


def draw(workers: int, seed: int) -> list[Grads]:
    """Random gradients, weighted by the workers' uneven shares."""
    rng = torch.Generator().manual_seed(seed)
    shares = torch.rand(workers, generator=rng).double()
    return [{name: s * normal(*shape, rng=rng) for name, shape in SHAPES.items()} for s in shares / shares.sum()]


def normal(*shape: int, rng: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def same(a: Grads, b: Grads) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def conduct(turns: Sequence[int], at_once: int) -> Flow[None]:
    """Gives turns, `at_once` at a time: loopback knows no time, so this makes workers fast and slow."""
    for i in range(0, len(turns), at_once):
        for actor in turns[i : i + at_once]:
            yield Send(actor, ())
        for actor in turns[i : i + at_once]:
            yield Recv(actor, ())


# --- 1. DC-ASGD: a server that makes late gradients fit -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DcAsgd(Synchrony):
    """Asynchronous; a late gradient is moved to the model now by g g, a cheap Hessian [Zheng et al. 2017].

    Their adaptive variant would also need a running mean of g g, but `correct` has no state.
    """

    lockstep: ClassVar[bool] = False
    lam: float

    def may_start(self, me: int, view: View) -> bool:
        return True

    def quorum(self, view: View) -> int:
        return 1

    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        return grad + self.lam * grad * grad * (now - read)


LR = 0.1
TARGETS = torch.linspace(-2, 2, 12).double().view(4, 3)
Event = tuple[type, int]


def train_with_server(how: Synchrony, seed: int, steps: int = 6) -> tuple[Tensor, list[Event]]:
    """Four workers, a server (4) of any synchrony and a conductor (5): the last model, and what the server saw."""
    log: list[Event] = []

    def serve() -> Flow[Tensor]:
        model, version, clocks, read, waiting = torch.ones(3).double(), 0, [0] * 4, {}, []
        while (request := (yield Serve())) is not None:
            sender, ask = request
            log.append((type(ask), sender))
            if isinstance(ask, Pull):
                read[sender] = model, version
                yield Reply(sender, (model,))
            else:
                grad = how.correct(ask.payload[0], model, read[sender][0], version - read[sender][1])
                clocks[sender] += 1
                waiting += [] if grad is None else [grad]
                if len(waiting) >= how.quorum(View(clocks=tuple(clocks))):
                    model, version, waiting = model - LR * sum(waiting), version + 1, []
                yield Reply(sender, (torch.tensor(grad is not None),))
        return model

    def ask(target: Tensor) -> Flow[None]:
        """A worker: pull in one turn, compute and push in the next."""
        for _ in range(steps):
            yield Recv(5, ())
            (model,) = yield Pull(4)
            yield Send(5, ())
            yield Recv(5, ())
            (accepted,) = yield Push(4, (torch.sin(model) - target,))
            yield Send(5, ())
            assert accepted

    turns = random.Random(seed).sample([*range(4)] * 2 * steps, 8 * steps)
    return loopback.run([*map(ask, TARGETS), serve(), conduct(turns, at_once=1)])[4], log


def replay(log: Sequence[Event], lam: float) -> tuple[Tensor, int]:
    """The same arrivals in one loop, by the paper's formula: the model and the greatest staleness."""
    model, backup, since, pushes, stalest = torch.ones(3).double(), {}, {}, 0, 0
    for kind, worker in log:
        if kind is Pull:
            backup[worker], since[worker] = model, pushes
        else:
            g = torch.sin(backup[worker]) - TARGETS[worker]
            model = model - LR * (g + lam * g * g * (model - backup[worker]))
            stalest, pushes = max(stalest, pushes - since[worker]), pushes + 1
    return model, stalest


@pytest.mark.parametrize("seed", range(5))
def test_dc_asgd_equals_its_recomputation_and_without_compensation_asgd(seed: int) -> None:
    (model, log), *plain = (train_with_server(how, seed) for how in (DcAsgd(lam=0.5), DcAsgd(lam=0.0), Asp()))
    (expected, stalest), (late, _) = replay(log, lam=0.5), replay(log, lam=0.0)
    assert len(log) == 2 * 4 * 6 and stalest >= 4
    assert close(model, expected) and not close(model, late, atol=1e-3)
    assert all(same_log == log and torch.equal(other, plain[0][0]) and close(other, late) for other, same_log in plain)


def test_dc_asgd_makes_late_gradients_fit() -> None:
    read, now = torch.tensor([2.0]), torch.tensor([2.2])
    late, fresh = -1 / read, -1 / now  # of -log x, whose second derivative is its slope squared
    fitted = DcAsgd(lam=1.0).correct(late, now, read, staleness=1)
    assert fitted is not None and (fitted - fresh).abs() < 0.2 * (late - fresh).abs()


# --- 2. Streaming DiLoCo: fragments that leave now and arrive later -------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A delta of one fragment of the model, which leaves now and enters when `finish_step` has been computed."""

    fragment: int
    finish_step: int


@dataclass(frozen=True, kw_only=True)
class StreamingDiloco(Optimization):
    """Fragments take turns; outer Nesterov on the mean delta, tau steps late [Douillard et al. 2025, alg. 2]."""

    every: int = 1
    fragments: int = 1
    tau: int = 0
    lr: float = 1.0
    momentum: float = 0.0
    mix: float = 0.0

    def due(self, step: int) -> tuple[Fragment, ...]:
        turn = [(step + 1 - f * self.every // self.fragments) % self.every == 0 for f in range(self.fragments)]
        finish = step + self.tau
        return tuple(Fragment(fragment=f, finish_step=finish) for f, now in enumerate(turn) if now)

    def merge(self, side: Side, mine: Tensor, theirs: Tensor, state: Outer) -> tuple[Tensor, Outer]:
        speed = self.momentum * state.get("speed", torch.zeros_like(mine)) + theirs
        anchor = state["anchor"] - self.lr * (theirs + self.momentum * speed)
        return self.mix * mine + (1 - self.mix) * anchor, {"anchor": anchor, "speed": speed}


RATES = LR * torch.tensor([1.0, 0.7, 0.4, 1.3, 0.9, 0.6]).double()
BOTTOMS = normal(4, 6, rng=torch.Generator().manual_seed(5))  # of each worker's quadratic bowl


def stream(how: StreamingDiloco, steps: int) -> tuple[Tensor, Tensor]:
    """Every worker's anchor, and its model after each step.

    Actors 0..n-1 are carriers, who sum deltas while their workers n..2n-1 go on: a topology numbers from 0.
    """
    n, start = len(BOTTOMS), torch.zeros(6).double()

    def carry(me: int) -> Flow[None]:
        for exchange in (exchange for step in range(steps) for exchange in how.due(step)):
            (delta,) = yield Recv(n + me, (start.tensor_split(how.fragments)[exchange.fragment],))
            mean = yield Sum(delta)
            yield Send(n + me, (mean,))

    def walk(me: int) -> Flow[tuple[Tensor, Tensor]]:
        model, path, under_way = start.clone(), [], []
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
                merged, states[f] = how.merge("worker", parts[f], theirs, states[f])
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


STREAMS = [StreamingDiloco(every=6, fragments=3, tau=tau, lr=0.7, momentum=0.6, mix=0.25) for tau in (0, 1, 3, 7)]


@pytest.mark.parametrize("how", [StreamingDiloco(), *STREAMS], ids=["mean_sgd", "tau=0", "tau=1", "tau=3", "tau=7"])
def test_streaming_diloco_equals_its_recomputation(how: StreamingDiloco) -> None:
    (anchors, paths), (anchor, models) = stream(how, steps=25), stream_by_hand(how, steps=25)
    assert (anchors == anchors[0]).all() and close(anchors[0], anchor) and close(paths[:, -1], models)
    assert torch.equal(paths[0, -1], paths[1, -1]) == (how.every == 1)  # between exchanges only anchors agree


def test_streaming_diloco_enters_tau_steps_late() -> None:
    _, alone = stream(StreamingDiloco(every=100), steps=8)
    _, late = stream(StreamingDiloco(every=4, tau=3), steps=8)  # leaves after step 3, enters after step 6
    assert (alone == late).all(-1).tolist() == [[True] * 6 + [False] * 2] * 4
    assert close(late[:, 6], alone[:, 3].mean(0).expand(4, 6))


# --- 3. AD-PSGD: swaps with whoever responds ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AdPsgd(Optimization):
    """Active workers average with passive neighbours, who answer whenever asked [Lian et al. 2018, alg. 1].

    Who the partner is belongs to a topology (a bipartite graph), but `Topology` only lowers collectives.
    """

    def due(self, step: int) -> tuple[Exchange, ...]:
        return (Exchange(what="model"),)

    def merge(self, side: Side, mine: Tensor, theirs: Tensor, state: Outer) -> tuple[Tensor, Outer]:
        return (mine + theirs) / 2, state


def gossip(seed: int, *, steps: int, lr: float, active: range, passive: range) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What models were, what they are, what local steps added in all, and what each swap added to its two.

    Workers, responders and a conductor are numbered by the seed, since loopback lets low numbers go first.
    """
    how, rng, workers = AdPsgd(), random.Random(seed), max(*active, *passive) + 1
    first = normal(workers, 3, rng=torch.Generator().manual_seed(seed))
    models, moved, gained, swaps = [*first], torch.zeros(3).double(), {}, []
    conductor, *number = rng.sample(range(workers + len(passive) + 1), workers + len(passive) + 1)
    responder = dict(zip(passive, number[workers:], strict=True))

    def work(w: int) -> Flow[None]:
        for step in range(steps):
            yield Recv(conductor, ())
            before = models[w]  # also the gradient: taken before the swap and applied after, as in the paper
            for _ in how.due(step) if w in active else ():
                (theirs,) = yield Swap(responder[rng.choice([p for p in passive if p != w])], (before,))
                models[w], _ = how.merge("worker", models[w], theirs, {})
                swaps.append(gained.pop(number[w]) + models[w] - before)
            models[w] = models[w] - lr * before
            moved.sub_(lr * before)
            yield Send(conductor, ())

    def respond(w: int) -> Flow[None]:
        while (request := (yield Serve())) is not None:
            (sender, swap), mine = request, models[w]
            models[w], _ = how.merge("worker", mine, swap.payload[0], {})
            gained[sender] = models[w] - mine
            yield Reply(sender, (mine,))

    flows = {conductor: conduct(rng.sample(number[:workers] * steps, workers * steps), at_once=workers)}
    flows |= {number[w]: work(w) for w in range(workers)} | {responder[w]: respond(w) for w in passive}
    loopback.run([flows[actor] for actor in sorted(flows)])
    return first, torch.stack(models), moved, torch.stack(swaps)


@pytest.mark.parametrize("seed", range(8))
def test_ad_psgd_conserves_and_contracts(seed: int) -> None:
    first, last, _, swaps = gossip(seed, steps=40, lr=0.0, active=range(3), passive=range(3, 6))
    assert len(swaps) == 3 * 40 and close(swaps, torch.zeros_like(swaps)) and close(last.sum(0), first.sum(0))
    assert close(last, first.mean(0).expand(6, 3), atol=1e-4)


def test_ad_psgd_leaves_both_sides_with_their_average() -> None:
    first, last, _, _ = gossip(0, steps=1, lr=0.0, active=range(1), passive=range(1, 2))
    assert (last == first.sum(0) / 2).all()


@pytest.mark.parametrize("seed", range(8))
def test_ad_psgd_moves_only_by_local_steps(seed: int) -> None:
    first, last, moved, _ = gossip(seed, steps=20, lr=0.1, active=range(2), passive=range(2, 5))
    assert close(last.sum(0), first.sum(0) + moved) and last.sum(0).norm() < 0.3 * first.sum(0).norm()


def test_ad_psgd_needs_a_bipartite_graph() -> None:
    """Where those who ask are also asked, a swap may meet a model that is in a swap: the sum drifts."""
    runs = [gossip(seed, steps=10, lr=0.0, active=range(4), passive=range(4)) for seed in range(8)]
    assert max((last - first).sum(0).abs().max() for first, last, _, _ in runs) > 1e-2


def test_swaps_without_responders_are_named_as_stuck() -> None:
    def ask(to: int) -> Flow[None]:
        yield Swap(to, (torch.zeros(1),))

    with pytest.raises(WeftError, match="Swap"):
        loopback.run([ask(1), ask(0)])
