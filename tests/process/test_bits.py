"""Bits: replicas agree at every step; `direct` gives the same bits however it runs; `ring` gives DDP's."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft
from tests.process.harness import spawn
from tests.process.replicas import (
    COMPRESSIONS,
    MORE_COMPRESSIONS,
    SCHEDULES,
    TOPOLOGIES,
    WORKERS,
    Double,
    batches,
    digest,
    model_with_dice,
)
from tests.process.training import fit, regression
from weft.compression import _coded
from weft.ops import Spec
from weft.profile import Measured
from weft.schedule import Rounds, Schedule, Timetable
from weft.schedule._wave import wave
from weft.strategy import Strategy

STEPS = 4
FEW_SCHEDULES = ("fused(bucket=1KiB, first=100B)", "priority(partition=4KiB, credit=16KiB, least=256B)")
OTHER_BUCKETS = ("fused(bucket=1KiB, first=100B)", "fused(bucket=64KiB, first=64KiB, alone=2KiB)")
Hashes = list[str]
"""A replica's state after each step."""
Outcome = tuple[Hashes, dict[int, list[float]]]
"""With it, each carried worker's losses."""


def train(strategies: Sequence[str]) -> list[Outcome]:
    """One run after another, each with a rendezvous of its own."""
    _coded.A_ROUND = 64  # so that codes travel in two phases
    store, outcomes = os.environ["WEFT_STORE"], []
    for strategy in strategies:
        os.environ["WEFT_STORE"] = f"{store}-{len(outcomes)}"
        run = weft.init(strategy, seed=3)
        model = model_with_dice()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = run.distribute(model, optimizer)
        hashes: Hashes = []
        losses: dict[int, list[float]] = {}
        for x, y in run.shard(batches(STEPS)):
            rank = run.rank
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.setdefault(rank, []).append(loss.item())
            if run.step > len(hashes):
                hashes.append(digest(model.state_dict(), optimizer.state_dict()["state"]))
        outcomes.append((hashes, losses))
        run.close()
    return outcomes


def spelled(topology: str) -> list[str]:
    schedules = SCHEDULES + OTHER_BUCKETS if topology == "direct" else SCHEDULES
    more = (
        [f"bsp / direct / {c} / {s}" for c in MORE_COMPRESSIONS for s in FEW_SCHEDULES] if topology == "direct" else []
    )
    return [f"bsp / {topology} / {c} / {s}" for c in COMPRESSIONS for s in schedules] + more


@functools.cache
def outcomes(topology: str, processes: int) -> dict[str, list[Outcome]]:
    """By strategy, what each process saw."""
    strategies = spelled(topology)
    rows = spawn(processes, train, strategies, workers=WORKERS)
    return dict(zip(strategies, map(list, zip(*rows, strict=True)), strict=True))


def losses_of(parts: list[Outcome]) -> dict[int, list[float]]:
    return dict(sorted((rank, losses) for _, told in parts for rank, losses in told.items()))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_replicas_are_equal_at_every_step(topology: str, compression: str, schedule: str) -> None:
    parts = outcomes(topology, WORKERS)[f"bsp / {topology} / {compression} / {schedule}"]
    hashes = [part[0] for part in parts]
    assert len(hashes) == WORKERS and len(set(hashes[0])) == STEPS  # it does move
    assert all(other == hashes[0] for other in hashes)


@pytest.mark.parametrize("compression", [*COMPRESSIONS, *MORE_COMPRESSIONS])
def test_direct_has_the_same_bits_however_it_runs(compression: str) -> None:
    """Any schedule, any buckets, and four workers on one, two, three or four processes; losses included."""
    schedules = FEW_SCHEDULES if compression in MORE_COMPRESSIONS else SCHEDULES + OTHER_BUCKETS
    first = outcomes("direct", WORKERS)[f"bsp / direct / {compression} / {schedules[0]}"]
    assert len(set(first[0][0])) == STEPS  # it does move
    for processes, schedule in itertools.product((1, 2, 3, 4), schedules):
        parts = outcomes("direct", processes)[f"bsp / direct / {compression} / {schedule}"]
        assert len(parts) == processes
        assert all(hashes == first[0][0] for hashes, _ in parts), (processes, schedule)
        assert losses_of(parts) == losses_of(first), (processes, schedule)


def start() -> tuple[str, str]:
    """A model that this process alone has drawn, before and after it becomes part of the run."""
    run = weft.init("bsp / direct")
    torch.manual_seed(run.rank)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), Double(nn.Linear(5, 2)))
    model[1].running_mean += run.rank
    before = digest(model.state_dict())
    run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return before, digest(model.state_dict())


def test_everyone_starts_from_process_0() -> None:
    rows = spawn(3, start, workers=WORKERS)
    assert len({before for before, _ in rows}) == 3
    assert {after for _, after in rows} == {rows[0][0]}


def test_dice_are_each_workers_own() -> None:
    """Every worker draws another dropout mask for the same batch, and the same one in whichever process it is."""
    draws = [dict(itertools.chain.from_iterable(spawn(n, throw, workers=WORKERS))) for n in (1, 3, 4)]
    assert draws[0] == draws[1] == draws[2]
    assert len(draws[0]) == WORKERS * 2 == len(set(draws[0].values()))


def throw() -> list[tuple[tuple[int, int], str]]:
    run = weft.init("bsp / direct")
    model = nn.Linear(1, 1)
    model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    drawn = []
    for _ in run.shard([torch.ones(1, 1)] * 2 * WORKERS):
        drawn.append(((run.step, run.rank), digest(torch.rand(50))))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return drawn


# --- DistributedDataParallel ----------------------------------------------------------------------------------------


CAP_MB = 0.03
LONG = 50


@dataclass(frozen=True, kw_only=True)
class DdpLayout(Schedule):
    """Buckets as DDP lays them out, whatever order backward takes."""

    groups: tuple[tuple[str, ...], ...]

    def timetable(self, specs: Sequence[Spec], rounds: Rounds, seen: Measured | None = None) -> Timetable:
        by_name = {spec.name: spec for spec in specs}
        return wave([[by_name[name] for name in group] for group in self.groups], rounds)


def wide_model() -> nn.Sequential:
    torch.manual_seed(6)
    layers: list[nn.Module] = [nn.Linear(40, 120), nn.ReLU()]
    for a, b in itertools.pairwise((120, 130, 90, 150, 60)):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(60, 3))


def ddp_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """DDP's first buckets, which it keeps with find_unused_parameters=True; a given cap holds for all of them."""
    names, params = zip(*model.named_parameters(), strict=True)
    limits = [int(CAP_MB * 1024 * 1024)]
    groups, _ = dist._compute_bucket_assignment_by_size(list(params), limits, [False] * len(params))
    return tuple(tuple(names[i] for i in group) for group in reversed(groups))


def ddp(model: nn.Module, groups: Sequence[Sequence[str]]) -> DistributedDataParallel:
    """DDP around a model, and a check that its buckets are these."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=CAP_MB, find_unused_parameters=True)
    sizes = [sum(model.get_parameter(name).numel() for name in group) for group in groups]
    assert [bucket.buffer().numel() for bucket in wrapped.reducer._get_zeros_like_grad_buckets()] == sizes
    return wrapped


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def beside_ddp() -> tuple[int, dict[str, list[float]], dict[str, str]]:
    """The same training three times: DDP, Weft with DDP's buckets, Weft as it is."""
    groups = ddp_groups(wide_model())
    strategies = {"same": Strategy.of(Strategy.parse("ring").topology, DdpLayout(groups=groups))}
    strategies |= {"plain": Strategy.parse("bsp / ring / fused")}
    store = os.environ["WEFT_STORE"]
    losses: dict[str, list[float]] = {}
    ends: dict[str, str] = {}
    for name, strategy in strategies.items():
        os.environ["WEFT_STORE"] = f"{store}-{name}"
        run = weft.init(strategy)
        model = wide_model()
        losses[name] = fit(*run.distribute(model, sgd(model)), run.shard(batches(LONG, width=40)), regression)
        ends[name] = digest(model.state_dict())
        if name == "same":
            model = wide_model()
            mine = itertools.islice(batches(LONG, width=40), run.rank, None, WORKERS)
            losses["ddp"] = fit(ddp(model, groups), sgd(model), mine, regression)
            ends["ddp"] = digest(model.state_dict())
        run.close()
    return len(groups), losses, ends


def test_ring_has_ddps_bits() -> None:
    """Float32 losses over fifty steps: equal bit for bit with DDP's buckets, to 1e-4 with Weft's own."""
    for buckets, losses, ends in spawn(WORKERS, beside_ddp):
        assert buckets >= 4 and len(losses["ddp"]) == LONG
        assert losses["ddp"][-1] < 0.9 * losses["ddp"][0]
        assert losses["same"] == losses["ddp"] and ends["same"] == ends["ddp"]
        assert losses["plain"] == pytest.approx(losses["ddp"], rel=1e-4)
