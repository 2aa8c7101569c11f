"""Who may go on when: a server's rounds in virtual time, against what each synchrony promises."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.axis import catalogue, parse_raw
from weft.rounds import Contribution, Rounds
from weft.runtime.server.prefetch import may_go_on
from weft.synchrony import Synchrony, View
from weft.synchrony.bsp import Bsp

SCHEDULES = 10_000
WRAPPERS = ("staleness_weighted", "delay_compensated", "negative_momentum")
BARE = [name for name in sorted(catalogue("synchrony")) if name not in WRAPPERS]


def of(text: str) -> Any:
    raw = parse_raw(text)
    return raw.build(catalogue("synchrony")[raw.name])


@dataclass
class Story:
    """What happened: each start as (worker, its clock, everyone's clocks), each update's contributors and staleness."""

    starts: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    dropped: int = 0
    ended_s: float = 0.0
    versions: int = 0


Grad = Callable[[int, int, Sequence[Tensor]], list[Tensor]]
"""(worker, step, the model that it read) -> gradients"""


def tell(
    how: Synchrony,
    workers: int,
    steps: int,
    takes: Callable[[int, int], float],
    *,
    model: Sequence[Tensor] = (),
    grad: Grad = lambda worker, step, model: [],
    update: Callable[[Sequence[Tensor]], None] = lambda grads: None,
    leaves: dict[int, int] | None = None,
) -> Story:
    """Run workers in virtual time: each reads when it may, computes for `takes` seconds, and contributes; in the end it
    reads once more, and leaves.

    `leaves`: workers that vanish after so many steps. Raises where nobody can go on.
    """
    story, leaves = Story(), leaves or {}
    holder = Rounds(how, model, workers, update, updated=lambda _, staleness: story.late.append(staleness))
    events: list[tuple[float, int]] = []
    waiting = dict.fromkeys(range(workers), 0.0)
    read: dict[int, list[Tensor]] = {}
    now = 0.0
    while True:
        while (worker := next((w for w in waiting if holder.may_start(w)), None)) is not None:
            del waiting[worker]
            holder.read(worker)
            if holder.clocks[worker] == steps:
                holder.leave(worker)
                continue
            story.starts.append((worker, holder.clocks[worker], tuple(holder.clocks)))
            read[worker] = [tensor.clone() for tensor in model]
            heapq.heappush(events, (now + takes(worker, holder.clocks[worker]), worker))
        if not events:
            break
        now, worker = heapq.heappop(events)
        step = holder.clocks[worker]
        grads = [each / workers for each in grad(worker, step, read[worker])]
        story.dropped += not holder.contribute(Contribution(worker, 1 / workers, grads))
        if holder.clocks[worker] == leaves.get(worker):
            holder.leave(worker)
        else:
            waiting[worker] = now
    assert not waiting, f"workers {sorted(waiting)} wait for ever"
    story.ended_s, story.versions = now, holder.version
    return story


@dataclass
class Reader:
    """A worker that is sent new versions: what it has, and what it is doing."""

    clock: int = 0
    has: tuple[int, int] = (0, 0)
    """A version, and the slowest worker's clock by then."""
    came: tuple[int, int] | None = None
    pushed_s: float = 0.0
    busy: bool = False


def tell_eagerly(
    how: Synchrony,
    workers: int,
    steps: int,
    takes: Callable[[int, int], float],
    *,
    leaves: dict[int, int] | None = None,
) -> Story:
    """The same where servers send what is new by themselves: pushes and versions travel for a while, and a worker goes
    on with what it has as long as it may. Every version that is computed with has all that the bound promises."""
    story, leaves = Story(), leaves or {}
    holder = Rounds(how, [], workers, lambda grads: None, updated=lambda _, staleness: story.late.append(staleness))
    readers = [Reader() for _ in range(workers)]
    made = {0: (0,) * workers}
    watching = dict.fromkeys(range(workers), 0)
    order, travels = itertools.count(), random.Random(steps)
    events: list[tuple[float, int, Callable[[float], None]]] = []

    def later(when_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(events, (when_s, next(order), act))

    def go_on(worker: int, now_s: float) -> None:
        me = readers[worker]
        if me.came is not None:
            me.has, me.came = max(me.has, me.came), None
            watching[worker] = me.has[1]
            send(now_s)
        if me.busy or me.clock == leaves.get(worker, steps) or not may_go_on(how, me.clock, me.has[1]):
            return
        me.busy = True
        story.starts.append((worker, me.clock, made[me.has[0]]))
        later(now_s + takes(worker, me.clock), lambda now_s: pushes(worker, me.has[0], now_s))

    def pushes(worker: int, version: int, now_s: float) -> None:
        me = readers[worker]
        me.busy, me.clock, me.pushed_s = False, me.clock + 1, max(me.pushed_s, now_s + travels.uniform(0, 20))
        last = me.clock == leaves.get(worker, steps)
        later(me.pushed_s, lambda now_s: counts(Contribution(worker, 1 / workers, [], version), last, now_s))
        go_on(worker, now_s)

    def counts(mine: Contribution, last: bool, now_s: float) -> None:
        holder.contribute(mine)
        made[holder.version] = tuple(holder.clocks)
        if last:
            holder.leave(mine.worker)
        send(now_s)

    def send(now_s: float) -> None:
        for worker in [w for w, clock in watching.items() if holder.view.slowest > clock and w not in holder.gone]:
            del watching[worker]
            sent = holder.read(worker), holder.view.slowest
            later(now_s + travels.uniform(0, 20), lambda now_s, worker=worker, sent=sent: comes(worker, sent, now_s))

    def comes(worker: int, sent: tuple[int, int], now_s: float) -> None:
        readers[worker].came = sent
        if not readers[worker].busy:
            go_on(worker, now_s)

    for worker in range(workers):
        holder.read(worker)
        go_on(worker, 0.0)
    while events:
        now_s, _, act = heapq.heappop(events)
        act(now_s)
    assert [me.clock for me in readers] == [leaves.get(w, steps) for w in range(workers)], "somebody waits for ever"
    story.versions = holder.version
    return story


def at_random(seed: int, spread: float = 10.0) -> Callable[[int, int], float]:
    """Durations that differ from step to step, and from worker to worker."""
    rng = random.Random(seed)
    return lambda worker, step: rng.uniform(1, spread) * (1 + worker % 3)


@pytest.mark.parametrize(("kind", "tell"), [("ssp", tell), ("essp", tell_eagerly)])
def test_nobody_is_further_ahead_than_the_slack(kind: str, tell: Callable[..., Story]) -> None:
    rng, reached = random.Random(1), 0
    for seed in range(SCHEDULES // 2):
        slack, workers = rng.randrange(0, 5), rng.randrange(2, 6)
        leaves = {0: 3} if seed % 5 == 0 else {}
        story = tell(of(f"{kind}(slack={slack})"), workers, 8, at_random(seed, 30.0), leaves=leaves)
        for worker, clock, clocks in story.starts:
            there = [c for w, c in enumerate(clocks) if w not in leaves or c < leaves[w]]
            assert clock - min(there) <= slack, (seed, worker, clock, clocks)
            reached += clock - min(there) == slack > 0
    assert reached > SCHEDULES / 10, "the bound was hardly ever reached, so this shows little"


def test_a_gradient_is_as_late_as_the_version_that_it_was_computed_with() -> None:
    late: list[int] = []
    holder = Rounds(of("essp(slack=9)"), [], 2, lambda grads: None, updated=lambda _, staleness: late.append(staleness))
    for read in (0, 0, 2, 2):
        holder.read(0)  # newer ones are sent, and lie there
        holder.contribute(Contribution(0, 0.5, [], read))
    assert late == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="version 5, which worker 0 has not read"):
        holder.contribute(Contribution(0, 0.5, [], 5))
    assert holder.clocks[0] == 4


def test_what_eager_workers_may_compute_with_is_kept_until_they_have_newer() -> None:
    model = [torch.zeros(1)]

    def update(grads: Sequence[Tensor | None]) -> None:
        model[0] += 1

    holder = Rounds(of("delay_compensated(essp, lam=1)"), model, 2, update)
    seen: list[float] = []
    holder.update = lambda grads: (seen.append(float(grads[0])), update(grads))[0]  # type: ignore[func-returns-value,arg-type]
    for read in (0, 0, 1):
        holder.read(0)
        holder.contribute(Contribution(0, 1.0, [torch.ones(1)], read))
    assert seen == [1.0, 1.0 + 1, 1.0 + 1]  # the model is 0, 1, 2 by then, and was 0, 0, 1
    with pytest.raises(ValueError, match="version 0"):
        holder.contribute(Contribution(0, 1.0, [torch.ones(1)], 0))


def test_delays_are_compensated_by_the_gradient_itself_whatever_its_share() -> None:
    model, seen = [torch.zeros(1)], list[float]()

    def update(grads: Sequence[Tensor | None]) -> None:
        assert grads[0] is not None
        seen.append(float(grads[0]))
        model[0] += 1

    holder = Rounds(of("delay_compensated(asp, lam=0.5)"), model, 4, update)
    for worker in (0, 1):
        holder.read(worker)
    for worker in (0, 1):
        holder.contribute(Contribution(worker, 0.25, [torch.full((1,), 0.25 * 2)]))
    assert seen == [2.0, 2.0 + 0.5 * 4 * 1]  # one update later the model has moved by 1


@pytest.mark.parametrize("text", sorted(catalogue("synchrony")))
def test_every_answer_lets_everyone_finish(text: str) -> None:
    how = of(f"{text}(asp)" if text in WRAPPERS else text)
    for seed in range(50):
        model = [torch.zeros(2)]

        def update(grads: Sequence[Tensor], model: list[Tensor] = model) -> None:
            model[0] -= grads[0]

        story = tell(how, 4, 10, at_random(seed), model=model, grad=lambda *_: [torch.full((2,), 0.04)], update=update)
        assert len(story.starts) == 40


@pytest.mark.parametrize(
    "text", [*BARE, "ssp(slack=inf)", "essp(slack=inf)", *(f"{w}({i})" for w in WRAPPERS for i in ("asp", "ssp"))]
)
def test_an_answer_waits_where_it_says_so(text: str) -> None:
    how, rng, held_up = of(text), random.Random(4), False
    for _ in range(200):
        clocks = tuple(rng.randrange(20) for _ in range(3))
        reads = tuple(rng.randrange(6) for _ in range(3))
        unseen = tuple(rng.uniform(0, 1) for _ in range(3))
        held_up |= not how.may_start(0, View(clocks=clocks, version=5, reads=reads, unseen=unseen))
    assert held_up == how.waits


def test_bsp_makes_one_update_of_each_step() -> None:
    story = tell(Bsp(), 4, 10, at_random(0))
    assert story.versions == 10 and set(story.late) == {0} and not story.dropped


def test_backup_drops_the_last_of_each_round() -> None:
    slow: Callable[[int, int], float] = lambda worker, step: 10.0 if worker == 3 else 1.0 + 0.01 * worker  # noqa: E731
    story = tell(of("backup(spares=1)"), 4, 40, slow, model=[torch.zeros(1)], grad=lambda *_: [torch.ones(1)])
    assert set(story.late) == {0}
    alone = tell(of("bsp"), 3, 40, slow).ended_s
    starts = [clocks for worker, _, clocks in story.starts if worker == 0]
    assert starts[-1][3] <= 5  # by then the slow one has made a few steps, and nobody has waited for it
    assert len([1 for worker, *_ in story.starts if worker < 3]) == 120
    assert story.dropped >= 3
    assert alone == pytest.approx(40 * 1.02, rel=1e-6)


def test_softsync_averages_as_many_as_it_says() -> None:
    rng = random.Random(0)
    for n, versions in ((1, 10), (2, 20), (4, 40)):
        holder = Rounds(of(f"softsync(n={n})"), [], 4, lambda grads: None)
        for worker in (rng.randrange(4) for _ in range(40)):
            assert holder.may_start(worker)
            holder.read(worker)
            holder.contribute(Contribution(worker, 0.25, []))
        assert holder.version == versions


def test_a_value_bound_makes_large_updates_wait_and_small_ones_not() -> None:
    def ended(size: float) -> float:
        model = [torch.zeros(1)]

        def update(grads: Sequence[Tensor]) -> None:
            model[0] -= grads[0]

        slow: Callable[[int, int], float] = lambda worker, step: 4.0 if worker == 3 else 1.0  # noqa: E731
        story = tell(
            of("value_bound(delta=0.5)"),
            4,
            12,
            slow,
            model=model,
            grad=lambda *_: [torch.full((1,), size)],
            update=update,
        )
        return max(i for i, (worker, *_) in enumerate(story.starts) if worker == 0) / len(story.starts)

    assert ended(1e-6) < 0.9 < ended(10.0)


# --- the same model as without servers ------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}
TARGETS = torch.linspace(-2, 2, 20).double().view(4, 5)


def gradient(worker: int, step: int, model: Sequence[Tensor]) -> list[Tensor]:
    return [torch.sin(model[0]) - TARGETS[worker] * (1 + 0.1 * step)]


def learn(how: Synchrony, optimizer: str, seed: int, steps: int = 12) -> Tensor:
    model = [torch.ones(5).double().requires_grad_()]
    steps_it = OPTIMIZERS[optimizer](model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(steps_it, 0.95)

    def update(grads: Sequence[Tensor]) -> None:
        model[0].grad = grads[0].clone()
        steps_it.step()
        scheduler.step()

    with torch.no_grad():
        tell(how, 4, steps, at_random(seed), model=model, grad=gradient, update=update)
    return model[0].detach()


def alone(optimizer: str, steps: int = 12) -> Tensor:
    model = [torch.ones(5).double().requires_grad_()]
    steps_it = OPTIMIZERS[optimizer](model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(steps_it, 0.95)
    with torch.no_grad():
        for step in range(steps):
            grads = [gradient(worker, step, model)[0] for worker in range(4)]
            model[0].grad = sum(grads[1:], grads[0]) / 4
            steps_it.step()
            scheduler.step()
    return model[0].detach()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_server_under_bsp_learns_what_one_process_learns(optimizer: str) -> None:
    expected = alone(optimizer)
    for seed in range(20):
        assert torch.allclose(learn(of("bsp"), optimizer, seed), expected, rtol=0, atol=1e-10)
        assert torch.equal(learn(of("ssp(slack=0)"), optimizer, seed), learn(of("bsp"), optimizer, seed + 99))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_endless_slack_is_asynchronous(optimizer: str) -> None:
    for seed in range(20):
        assert torch.equal(learn(of("ssp(slack=inf)"), optimizer, seed), learn(of("asp"), optimizer, seed))
    assert not torch.allclose(learn(of("asp"), optimizer, 0), alone(optimizer), atol=1e-3)


# --- making late gradients fit --------------------------------------------------------------------------------------


def test_wrappers_do_what_their_papers_say() -> None:
    grad, now, read = torch.tensor([2.0, -1.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.5, 2.0])
    assert torch.equal(of("staleness_weighted(asp)").correct(grad, now, read, 3), grad / 4)
    fitted = of("delay_compensated(asp, lam=0.5)").correct(grad, now, read, 1)
    assert torch.allclose(fitted, torch.tensor([2.0 + 0.5 * 4 * 0.5, -1.0 + 0.5 * 1 * -1.0]))
    assert of("negative_momentum(asp)").momentum(0.9, 4) == pytest.approx(0.15)
    assert of("negative_momentum(asp)").momentum(0.0, 4) == pytest.approx(-0.75)
    assert of("staleness_weighted(backup)").correct(grad, now, read, 1) is None
    assert of("staleness_weighted(essp)").eager and of("staleness_weighted(delay_compensated(asp))").looks_back


@pytest.mark.parametrize(
    "text",
    [
        "ssp(slack=-1)",
        "ssp(slack=1.5)",
        "essp(slack=-2)",
        "backup(spares=-1)",
        "softsync(n=0)",
        "value_bound(delta=0)",
        "delay_compensated(asp, lam=-1)",
        "negative_momentum(asp, least=-1)",
    ],
)
def test_what_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        of(text)


def test_a_worker_that_leaves_is_not_waited_for_and_may_come_back() -> None:
    holder = Rounds(of("ssp(slack=1)"), [], 2, lambda grads: None)
    for worker in (0, 1):
        holder.read(worker)
    for _ in range(2):
        holder.contribute(Contribution(0, 0.5, []))
        holder.read(0)
    assert not holder.may_start(0)
    holder.leave(1)
    assert holder.may_start(0)
    holder.join(1)
    assert holder.clocks == [2, 2] and holder.may_start(1) and math.isclose(holder.view.members, 2)
