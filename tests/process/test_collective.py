"""The real interpreter does what loopback says: every topology, every collective, on any layout of the workers."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.process.harness import spawn
from weft.axis import catalogue, make
from weft.ops import All, Collective, Flow, Scatter, Sum, nbytes
from weft.topology import CollectiveTopology
from weft.transport import loopback
from weft.transport.collective import Processes, Wire

TOPOLOGIES: dict[str, Any] = {
    name: make(kind, {}) for name, kind in catalogue("topology").items() if issubclass(kind, CollectiveTopology)
}
LAYOUTS = ((4, 4), (5, 2), (5, 3), (3, 1), (4, 3))
"""(workers, processes)."""
SIZES = (1, 2, 3, 5, 8, 13, 64)
"""Some smaller than the number of workers, some odd."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

ANY_FLOATS = "Sum of any floats"
"""Has the same bits only under a topology that is exact."""


def whole(name: str, rank: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers, few enough bits for any sum of them to be exact; none where the dtype has no sign."""
    rng = torch.Generator().manual_seed(sum(map(ord, f"{name}{rank}{shape}{dtype}")))
    return torch.randint(0 if dtype is torch.uint8 else -9, 10, shape, generator=rng).to(dtype)


def intents(rank: int, workers: int) -> dict[str, Collective]:
    """What one worker states, by name; each with values of its own."""
    stated: dict[str, Collective] = {}
    for size, dtype in itertools.product(SIZES, DTYPES):
        stated[f"Sum {size} {dtype}"] = Sum(whole("sum", rank, size, dtype=dtype))
    stated["Sum of a matrix"] = Sum(whole("matrix", rank, 3, 7, dtype=torch.float32))
    for dtype in DTYPES:
        rng = torch.Generator().manual_seed(rank)
        stated[f"{ANY_FLOATS} {dtype}"] = Sum(torch.randn(1000, generator=rng).to(dtype))
    for size in SIZES:
        stated[f"All {size}"] = All(mixed("all", rank, size))
        stated[f"Scatter {size}"] = Scatter([mixed(f"to {to}", rank, size) for to in range(workers)])
    uneven = [mixed(f"to {to}", rank, to) for to in range(workers)]  # each worker's parts have a size of their own
    stated["Scatter to each its own size"] = Scatter(uneven)
    stated["All of one"] = All((whole("one", rank, 4, dtype=torch.int64),))
    return stated


def mixed(name: str, rank: int, size: int) -> tuple[Tensor, ...]:
    """Several dtypes in one payload, laid out so that alignment matters; and a part without elements."""
    dtypes = (torch.uint8, torch.float32, torch.float16, torch.int64, torch.float64)
    parts = [whole(name, rank, size + at % 2, dtype=dtype) for at, dtype in enumerate(dtypes)]
    return (*parts, torch.empty(0), whole(name, rank, 2, size, dtype=torch.int32))


def state(intent: Collective) -> Flow[Any]:
    return (yield intent)


def finish(wire: Wire) -> list[Any]:
    """Drive a wire to its end, waiting for whatever it has issued."""
    while True:
        try:
            next(wire).wait()
        except StopIteration as stop:
            return list(stop.value)


def perform(topologies: list[str]) -> dict[str, Any]:
    """By topology and intent, what each worker of this process gets."""
    run = weft.init()
    layout = run.world.layout
    got: dict[str, Any] = {}
    for topology in topologies:
        transport = Processes(TOPOLOGIES[topology], layout, mesh=run._process.transport.mesh)
        mine = [intents(rank, layout.workers) for rank in layout.carried()]
        for tag, name in enumerate(mine[0]):
            got[f"{topology} {name}"] = finish(transport.perform([stated[name] for stated in mine], tag))
    return got


@functools.cache
def performed(workers: int, processes: int) -> dict[str, list[Any]]:
    """What every worker gets, in the order of ranks."""
    rows = spawn(processes, perform, list(TOPOLOGIES), workers=workers)
    return {name: [result for row in rows for result in row[name]] for name in rows[0]}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("workers", "processes"), LAYOUTS)
def test_performs_what_loopback_means(workers: int, processes: int, topology: str) -> None:
    everyone = [intents(rank, workers) for rank in range(workers)]
    for name in everyone[0]:
        if name.startswith(ANY_FLOATS) and not TOPOLOGIES[topology].exact:
            continue
        wanted = loopback.run([state(stated[name]) for stated in everyone])
        assert same(performed(workers, processes)[f"{topology} {name}"], wanted), name


def same(got: Any, wanted: Any) -> bool:
    """Equal bits, dtypes and shapes, however nested."""
    if isinstance(wanted, Tensor):
        return got.dtype == wanted.dtype and torch.equal(got, wanted)
    return len(got) == len(wanted) and all(map(same, got, wanted))


# --- several exchanges under way ------------------------------------------------------------------------------------


def interleave(topologies: list[str]) -> list[list[Tensor]]:
    """Several wires at a time, resumed in turns, as the engine does with buckets."""
    run = weft.init()
    layout = run.world.layout
    got = []
    for topology in topologies:
        transport = Processes(TOPOLOGIES[topology], layout, mesh=run._process.transport.mesh)
        wires = {tag: drive(transport, [two_sums(rank, tag) for rank in layout.carried()], tag) for tag in range(3)}
        under_way: dict[int, Any] = dict.fromkeys(wires)
        ends: dict[int, list[Tensor]] = {}
        while under_way:
            for tag in list(under_way):
                if under_way[tag] is not None:
                    under_way[tag].wait()
                try:
                    under_way[tag] = next(wires[tag])
                except StopIteration as stop:
                    ends[tag] = stop.value
                    del under_way[tag]
        got.append([torch.cat(parts) for parts in zip(*(ends[tag] for tag in sorted(ends)), strict=True)])
    return [list(parts) for parts in zip(*got, strict=True)]


def drive(transport: Processes, flows: list[Flow[Any]], tag: int) -> Wire:
    """Run one flow per carried worker to its end; returns what each returned."""
    results: list[Any] = [None] * len(flows)
    while True:
        try:
            ops = [flow.send(result) for flow, result in zip(flows, results, strict=True)]
        except StopIteration as first:
            ended = [first.value]
            for flow, result in zip(flows[1:], results[1:], strict=True):
                try:
                    flow.send(result)
                except StopIteration as stop:
                    ended.append(stop.value)
            return ended
        results = yield from transport.perform(ops, tag)


def two_sums(rank: int, tag: int) -> Flow[Tensor]:
    """Writes into its first result, which belongs to it, and hands it in again."""
    first = yield Sum(whole("first", rank, 11 + tag, dtype=torch.float64))
    first += rank
    return (yield Sum(first))


@pytest.mark.parametrize(("workers", "processes"), LAYOUTS)
def test_a_result_is_the_flows_own_and_wires_do_not_mix(workers: int, processes: int) -> None:
    rows = spawn(processes, interleave, list(TOPOLOGIES), workers=workers)
    got = [worker for row in rows for worker in row]
    by_tag = [loopback.run([two_sums(rank, tag) for rank in range(workers)]) for tag in range(3)]
    wanted = [torch.cat(parts) for parts in zip(*by_tag, strict=True)]
    assert len(got) == workers
    for rank, by_topology in enumerate(got):
        for topology, result in zip(TOPOLOGIES, by_topology, strict=True):
            assert torch.equal(result, wanted[rank]), topology


# --- bytes ----------------------------------------------------------------------------------------------------------


def weigh(topologies: list[str]) -> dict[str, float]:
    run = weft.init()
    layout = run.world.layout
    sent = {}
    for topology, op in itertools.product(topologies, (Sum, All, Scatter)):
        transport = Processes(TOPOLOGIES[topology], layout, mesh=run._process.transport.mesh)
        finish(transport.perform([sized(op, layout.workers)], 0))
        sent[f"{topology} {op.__name__}"] = transport.sent_bytes
    return sent


def sized(op: type[Collective], workers: int) -> Collective:
    payload = torch.zeros(24)
    if op is Sum:
        return Sum(payload)
    return All((payload,)) if op is All else Scatter([(part,) for part in payload.split(24 // workers)])


def test_sent_bytes_are_what_the_topology_declares() -> None:
    """With one worker to a process and sizes that divide, all send as much as the busiest; but in a tree."""
    rows = spawn(4, weigh, list(TOPOLOGIES))
    for name, topology in TOPOLOGIES.items():
        for op in (Sum, All, Scatter):
            wanted = topology.wire_bytes(op, nbytes((torch.zeros(24),)), 4)
            sent = [row[f"{name} {op.__name__}"] for row in rows]
            assert max(sent) == wanted and (sent == [wanted] * 4 or name == "tree"), (name, op)
