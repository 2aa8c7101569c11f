"""The kill law: after SIGKILL and resume, a synchronous run is the uninterrupted run, bit for bit.

Losses, weights, optimizer state and data order; at a random step and point, for every pair of topology, compression and
schedule, and in soak for every three; under `direct` also on another number of processes, with other buckets and
another schedule.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import weft
from tests.process.faults import POINTS, Faults
from tests.process.harness import ChildError, spawn
from tests.process.replicas import (
    COMPRESSIONS,
    MORE_COMPRESSIONS,
    SCHEDULES,
    TOPOLOGIES,
    digest,
    model_with_dice,
)
from weft.compression import _coded
from weft.profile import Cost, Measured
from weft.runtime.checks import replicas
from weft.store.checkpoint import found_in, newest

WORKERS, STEPS, EVERY = 4, 9, 2


class Noisy(Dataset[Any]):
    """Samples with noise that is drawn when they are loaded."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 13, generator=torch.Generator().manual_seed(8))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index] + 0.01 * torch.randn(13)
        return x, self.x[index, :3].sin()


def job(folder: str, attempt: int, loaders: int = 0) -> str:
    """Train to the end, noting every batch and loss on the way; returns a hash of the final state."""
    replicas.HASH_EVERY = 3
    _coded.A_ROUND = 64  # so that codes travel in two phases
    run = weft.init(out=folder, steps=STEPS, seed=3)
    model = model_with_dice()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    model, optimizer, scheduler, average = run.distribute(model, optimizer, scheduler, average)
    Faults.here().attach(run, model, optimizer)
    how = "fork" if loaders else None
    data = Noisy(6 * WORKERS * 5)
    loader = DataLoader(data, batch_size=6, shuffle=True, num_workers=loaders, multiprocessing_context=how)
    notes = os.open(f"{folder}/notes-{attempt}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for x, y in run.shard(loader, epochs=None):  # an epoch has five steps
        rank, step = run.rank, run.step + 1
        loss = nn.functional.mse_loss(model(x), y)
        note = [step, rank, loss.item().hex(), digest(x)]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if run.step == step:
            average.update_parameters(model)
        os.write(notes, (json.dumps(note) + "\n").encode())
    state = digest(model.state_dict(), optimizer.state_dict()["state"], average.state_dict())
    final = f"{state} {optimizer.param_groups[0]['lr'].hex()}"
    run.close()
    return final


def prepared(folder: Path) -> Path:
    """A run folder in which schedules find what they would have to measure, so that two runs have one timetable."""
    folder.mkdir(parents=True)
    model = model_with_dice()
    ready = {name: 0.001 * at for at, (name, _) in enumerate(reversed(list(model.named_parameters())))}
    seen = Measured(ready_s=ready, cost=Cost(points=((1024, 0.0004), (65536, 0.001))), fill_s=1e-9)
    (folder / "seen.json").write_text(json.dumps(asdict(seen)))
    return folder


class Story:
    """One run, with its ends and new beginnings."""

    def __init__(self, folder: Path, loaders: int = 0) -> None:
        self.folder, self.loaders, self.attempt = prepared(folder), loaders, 0

    def go(self, strategy: str, processes: int = WORKERS, faults: Faults | None = None) -> str | None:
        """Start or resume; returns the final state, or None where a fault has ended it."""
        env = {"WEFT_STRATEGY": strategy, "WEFT_SAVE_EVERY": str(EVERY), **(faults or Faults()).env}
        if found_in(self.folder / "checkpoints"):
            env["WEFT_RESUME"] = str(newest(self.folder / "checkpoints")[0])
        self.attempt += 1
        try:
            args = str(self.folder), self.attempt, self.loaders
            finals = spawn(processes, job, *args, workers=WORKERS, fresh=faults is not None, **env)
        except ChildError:
            if not faults:
                raise
            return None
        assert len(set(finals)) == 1
        return str(finals[0])

    def notes(self) -> dict[tuple[int, int], tuple[str, str]]:
        """By step and rank, the loss and the batch; whoever took a step again must have found the same."""
        known: dict[tuple[int, int], tuple[str, str]] = {}
        for file in sorted(self.folder.glob("notes-*")):
            for line in file.read_text().splitlines():
                step, rank, loss, batch = json.loads(line)
                assert known.setdefault((step, rank), (loss, batch)) == (loss, batch), f"step {step} of worker {rank}"
        return known


@functools.cache
def uninterrupted(strategy: str, scratch: Path, loaders: int = 0) -> tuple[str, dict[Any, Any]]:
    name = hashlib.sha256(f"{strategy}{loaders}".encode()).hexdigest()[:12]
    story = Story(scratch / name, loaders)
    final = story.go(strategy)
    notes = story.notes()
    assert final is not None and set(notes) == set(itertools.product(range(1, STEPS + 1), range(WORKERS)))
    assert len({batch for _, batch in notes.values()}) == len(notes)  # no batch twice: noise is drawn anew
    return final, notes


def reference(topology: str, compression: str, schedule: str) -> str:
    """Under `direct` a schedule changes nothing, so that one run stands for all."""
    return f"bsp / {topology} / {compression} / {'wfbp' if topology == 'direct' else schedule}"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted")


ALL = itertools.product(enumerate(TOPOLOGIES), enumerate(COMPRESSIONS), enumerate(SCHEDULES))


@pytest.mark.parametrize(
    ("topology", "compression", "schedule"),
    [pytest.param(t, c, s, marks=[pytest.mark.slow] * ((i + j + k) % 3 != 0)) for (i, t), (j, c), (k, s) in ALL],
)
def test_killed_and_resumed_is_the_same_run(
    tmp_path: Path, scratch: Path, topology: str, compression: str, schedule: str
) -> None:
    strategy = f"bsp / {topology} / {compression} / {schedule}"
    dice = random.Random(strategy)
    step = dice.randint(2, STEPS - 1)  # behind the last one nobody would notice before the last save
    fault = Faults().kill(rank=dice.randrange(WORKERS), at_step=step, point=dice.choice(POINTS))
    story = Story(tmp_path / "run")
    assert story.go(strategy, faults=fault) is None
    final, notes = uninterrupted(reference(topology, compression, schedule), scratch)
    assert story.go(strategy) == final and story.notes() == notes


SERVED = (
    ("bsp / parameter_server(servers=2) / priority", "bsp / parameter_server(servers=3)"),
    ("bsp / colocated", "bsp / direct"),
    ("bsp / hierarchical(groups=2)", "bsp / hierarchical(groups=1, servers=2) / wfbp"),
    ("bsp / direct", "bsp / parameter_server(servers=2)"),
)


@pytest.mark.parametrize(("before", "after"), SERVED)
def test_killed_with_servers_or_resumed_with_them_it_is_the_run_without(
    tmp_path: Path, scratch: Path, before: str, after: str
) -> None:
    dice = random.Random(before)
    story = Story(tmp_path / "run")
    fault = Faults().kill(rank=dice.randrange(WORKERS), at_step=dice.randint(4, STEPS - 1), point=dice.choice(POINTS))
    assert story.go(before, faults=fault) is None
    final, notes = uninterrupted("bsp / direct / dense / wfbp", scratch)
    assert story.go(after) == final and story.notes() == notes


def resized(tmp_path: Path, scratch: Path, compression: str, dice: random.Random, sizes: Sequence[int]) -> None:
    """One run under `direct`, killed and resumed on other numbers of processes, with other schedules and buckets."""
    story = Story(tmp_path)
    reached = 1
    for processes in sizes[:-1]:
        schedule = dice.choice((*SCHEDULES, "fused(bucket=1KiB, first=100B)"))
        reached = dice.randint(reached + 1, max(reached + 1, STEPS - 2))
        point = dice.choice(("forward", "backward"))  # behind backward it is another carried worker's turn
        fault = Faults().kill(rank=dice.randrange(WORKERS), at_step=min(reached, STEPS), point=point)
        assert story.go(f"bsp / direct / {compression} / {schedule}", processes, fault) is None
        saved = found_in(story.folder / "checkpoints")
        reached = int(saved[0].name[5:]) + 1 if saved else 1
    final, notes = uninterrupted(f"bsp / direct / {compression} / wfbp", scratch)
    assert story.go(f"bsp / direct / {compression} / {dice.choice(SCHEDULES)}", sizes[-1]) == final
    assert story.notes() == notes


@pytest.mark.parametrize("compression", [*COMPRESSIONS, *MORE_COMPRESSIONS])
def test_resized_from_4_to_3_to_4_to_2_is_the_same_run(tmp_path: Path, scratch: Path, compression: str) -> None:
    resized(tmp_path / "run", scratch, compression, random.Random(f"resized {compression}"), (4, 3, 4, 2))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_three_hundred_kills(tmp_path: Path, scratch: Path, part: int) -> None:
    """Ten runs each, three kills a run, on one to four processes."""
    dice = random.Random(part)
    for story in range(10):
        sizes = [dice.randint(1, WORKERS) for _ in range(4)]
        resized(tmp_path / str(story), scratch, dice.choice(COMPRESSIONS), dice, sizes)


def test_what_loaders_have_fetched_ahead_does_not_count(tmp_path: Path, scratch: Path) -> None:
    """Loading in two processes of its own, four batches ahead, with noise that is drawn there."""
    story = Story(tmp_path / "run", loaders=2)
    strategy = "bsp / direct"
    assert story.go(strategy, faults=Faults().kill(rank=2, at_step=7, point="backward")) is None
    final, notes = uninterrupted(strategy, scratch, loaders=2)
    assert story.go(strategy, processes=3) == final and story.notes() == notes


def test_stopped_and_slow_workers_change_nothing(tmp_path: Path, scratch: Path) -> None:
    faults = Faults().stop(rank=1, at_step=3, for_s=0.5).slow(rank=2, by_s=0.05, point="backward")
    story = Story(tmp_path / "run")
    final, notes = uninterrupted("bsp / direct / dense / wfbp", scratch)
    assert story.go("bsp / direct / priority", faults=faults) == final and story.notes() == notes
