"""Laws of synchronies: every worker finishes, rounds can be closed, and a correction keeps the gradient's kind."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.pure.laws.catalogues import all_of, default
from weft.axis import catalogue
from weft.ops import Flow, Place, Sum
from weft.rounds import Rounds
from weft.synchrony import Synchrony, View
from weft.topology import ServerTopology
from weft.transport import loopback, virtual
from weft.transport._servers import actor_hosts, server_flows

synchronies = all_of(
    "synchrony",
    *("ssp(slack=0)", "ssp(slack=inf)", "essp(slack=0)", "backup(spares=2)", "backup(spares=9)", "softsync(n=4)"),
    *("delay_compensated(ssp)", "staleness_weighted(backup)", "negative_momentum(softsync)"),
)
SERVED = [topology for kind in catalogue("topology").values() if isinstance(topology := default(kind), ServerTopology)]


@synchronies
@pytest.mark.parametrize("topology", SERVED, ids=str)
def test_every_worker_finishes(synchrony: Synchrony, topology: ServerTopology) -> None:
    """Four workers through servers, without time and with links between them."""
    n, steps, made = 4, 6, list[Rounds]()
    place = Place(workers=n, latency_s=0.25, bytes_per_s=64.0)
    share = 8 // topology.num_shards(n)

    def make(askers: int) -> Rounds:
        model = [torch.zeros(share)]

        def update(grads: Sequence[Tensor | None]) -> None:
            assert grads[0] is not None
            model[0] -= grads[0]

        made.append(Rounds(synchrony, model, askers, update))
        return made[-1]

    def train(me: int) -> Flow[int]:
        for step in range(steps):
            model = yield from topology.lower(Sum(torch.full((8,), 0.1 * (me + step))), me, place)
            assert bool(torch.isfinite(model).all())
        return steps

    for timed in (False, True):
        flows = [*map(train, range(n)), *server_flows(topology, n, make)]
        results = virtual.run(flows, place, actor_hosts(topology, n)).results if timed else loopback.run(flows)
        assert results[:n] == [steps] * n
    assert all(rounds.clocks == [steps] * rounds.workers and rounds.version for rounds in made)


@synchronies
def test_a_quorum_can_be_reached(synchrony: Synchrony) -> None:
    for workers in range(1, 9):
        for gone in itertools.chain.from_iterable(itertools.combinations(range(workers), k) for k in range(workers)):
            view = View(clocks=(3,) * workers, gone=frozenset(gone), version=3, reads=(3,) * workers)
            assert 1 <= synchrony.quorum(view) <= view.members


@synchronies
def test_the_slowest_worker_may_start(synchrony: Synchrony) -> None:
    """Somebody can always go on: the worker that is behind all others, once an update has followed its last read."""
    for clocks in itertools.product(range(3), repeat=3):
        view = View(clocks=clocks, version=9, reads=(8, 8, 8), unseen=(9.0, 9.0, 9.0))
        assert synchrony.may_start(clocks.index(min(clocks)), view)


@synchronies
def test_a_fresh_gradient_is_accepted_as_it_is(synchrony: Synchrony) -> None:
    grad, model = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 4.0])
    fitted = synchrony.correct(grad, model, model, 0)
    assert fitted is not None and torch.equal(fitted, grad)
