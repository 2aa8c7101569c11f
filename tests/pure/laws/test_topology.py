"""Laws of topologies: lowered flows have the meaning of the operation, virtual time and bytes are the declared ones.

Servers are actors with the rounds that the runtime uses (`weft/rounds.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pure.laws.catalogues import answers
from weft.ops import All, Collective, Flow, Place, Scatter, Sum
from weft.topology import CollectiveTopology, MemoryTopology, ServerTopology
from weft.topology._parts import fold_groups
from weft.transport import loopback, virtual
from weft.transport._servers import actor_hosts, server_flows

collectives = [topology for topology in answers("topology") if isinstance(topology, CollectiveTopology)]
topologies = pytest.mark.parametrize("topology", collectives, ids=str)
with_servers = [
    topology
    for topology in answers(
        *("topology", "parameter_server(servers=2)", "parameter_server(servers=4)", "parameter_server(servers=0)"),
        *("hierarchical(groups=1)", "hierarchical(groups=4, servers=2)", "hierarchical(groups=2, servers=4)"),
        "hierarchical(groups=100)",
    )
    if isinstance(topology, ServerTopology)
]
servers = pytest.mark.parametrize("topology", with_servers, ids=str)


def test_every_topology_is_of_one_kind() -> None:
    for topology in answers("topology"):
        kinds = [kind for kind in (CollectiveTopology, ServerTopology, MemoryTopology) if isinstance(topology, kind)]
        assert len(kinds) == 1
        assert bool(topology.homes(2)) == (kinds == [ServerTopology])


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
def test_lowered_is_what_is_meant(topology: CollectiveTopology, op: type[Collective], workers: int) -> None:
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
def test_virtual_time_is_the_closed_form(
    topology: CollectiveTopology, op: type[Collective], workers: int, link: str
) -> None:
    numel, place = numel_of(workers), place_of(workers, link)
    assert virtual.cost(topology, op, numel, place).seconds == topology.seconds(op, 4 * numel, place)


@topologies
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("workers", [3, 5, 6, 7, 9, 12, 13])
@links
def test_virtual_time_where_workers_are_no_power_of_two(
    topology: CollectiveTopology, op: type[Collective], workers: int, link: str
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
def test_declared_bytes_are_those_of_the_busiest(
    topology: CollectiveTopology, op: type[Collective], workers: int
) -> None:
    numel = numel_of(workers)
    sent = virtual.cost(topology, op, numel, place_of(workers)).sent_bytes
    assert max(sent) == pytest.approx(topology.wire_bytes(op, 4 * numel, workers), rel=1e-12)


@topologies
@pytest.mark.parametrize("op", OPS)
def test_nobody_waits_for_oneself(topology: CollectiveTopology, op: type[Collective]) -> None:
    assert topology.seconds(op, 1000, place_of(1)) == 0
    assert topology.wire_bytes(op, 1000, 1) == 0


# --- servers --------------------------------------------------------------------------------------------------------


def summed(topology: ServerTopology, payloads: list[Tensor], *, timed: bool) -> list[Tensor]:
    """Each worker's result of two sums in a row: the second has nothing left of the first."""
    place = Place(workers=len(payloads))

    def twice(me: int) -> Flow[Tensor]:
        yield from topology.lower(Sum(torch.ones_like(payloads[me])), me, place)
        return (yield from topology.lower(Sum(payloads[me]), me, place))

    n = place.workers
    flows = [*map(twice, range(n)), *server_flows(topology, n)]
    results = virtual.run(flows, place, actor_hosts(topology, n)).results if timed else loopback.run(flows)
    return results[:n]


@servers
@pytest.mark.parametrize("workers", range(1, 10))
@pytest.mark.parametrize("timed", [False, True], ids=["loopback", "virtual"])
def test_a_sum_through_servers_is_what_is_meant(topology: ServerTopology, workers: int, timed: bool) -> None:
    """Bit for bit: on whole numbers always, on any numbers where the topology is exact."""
    for size in (1, 2, 5, 17, 64):
        rng = torch.Generator().manual_seed(size)
        payloads = [whole_numbers(rank, size) for rank in range(workers)]
        if topology.exact:
            payloads = [torch.randn(size, generator=rng) for _ in range(workers)]
        before = [payload.clone() for payload in payloads]
        wanted = loopback.meaning([Sum(payload) for payload in payloads])
        assert same(summed(topology, payloads, timed=timed), wanted), size
        assert same(payloads, before)


@servers
@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
@links
def test_virtual_time_with_servers_is_the_closed_form(topology: ServerTopology, workers: int, link: str) -> None:
    numel, place = numel_of(workers), place_of(workers, link)
    assert virtual.cost(topology, Sum, numel, place).seconds == topology.seconds(4 * numel, place)


@servers
@pytest.mark.parametrize("workers", [3, 5, 6, 7, 9, 12, 13])
@links
def test_virtual_time_where_servers_have_uneven_work(topology: ServerTopology, workers: int, link: str) -> None:
    """Off by at most one message of a whole payload each way, where neither workers nor servers divide the other."""
    numel, place = 4 * numel_of(workers), place_of(workers, link)
    seconds, closed = virtual.cost(topology, Sum, numel, place).seconds, topology.seconds(4 * numel, place)
    assert abs(seconds - closed) <= 2 * 4 * numel / place.bytes_per_s + 1e-12


@servers
@pytest.mark.parametrize("workers", [*range(1, 10), 12, 16])
def test_declared_bytes_of_servers_are_the_observed_ones(topology: ServerTopology, workers: int) -> None:
    numel = 4 * numel_of(workers)
    outcome = virtual.cost(topology, Sum, numel, place_of(workers))
    assert max(outcome.sent_bytes) == pytest.approx(topology.wire_bytes(4 * numel, workers), rel=1e-12)
    declared = topology.link_bytes(4 * numel, 4 * numel, workers)
    assert max(outcome.link_bytes) == pytest.approx(declared, rel=1e-12)


@servers
@pytest.mark.parametrize("workers", range(1, 10))
def test_every_server_has_a_host(topology: ServerTopology, workers: int) -> None:
    hosts, groups = topology.server_hosts(workers), topology.worker_groups(workers)
    assert topology.num_shards(workers) == len(hosts) - len(groups) >= 1
    assert sorted({*hosts, *range(workers)}) == list(range(max(workers, 1 + max(hosts))))
    assert not groups or [worker for group in groups for worker in group] == list(range(workers))
