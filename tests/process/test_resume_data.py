"""A resumed run goes on in its data: every sample once an epoch, on any number of workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

import weft
from tests.process.harness import spawn
from weft.store.checkpoint import newest

# --- data -------------------------------------------------------------------------------------------------------------


def reader(folder: str, steps: int, kind: str) -> list[int]:
    """Samples 0 to 23 in a random order, one a batch; returns those that this process has seen in one epoch."""
    run = weft.init(out=folder, steps=steps, save_every=1)
    model: Any = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
    run.distribute(model, optimizer)
    samples = TensorDataset(torch.arange(24.0).view(24, 1))
    loader: Any = DataLoader(samples, batch_size=1, shuffle=True)
    if kind == "a stream":
        loader = (each for each in loader)
    seen = []
    for (x,) in run.shard(loader):
        if run._process.share:  # one without a batch computes on another's, which counts for nothing
            seen.append(int(x))
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return seen


@pytest.mark.parametrize("kind", ["a loader", "a stream"])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 1)])
def test_each_sample_once_an_epoch_whatever_the_number_of_workers(
    tmp_path: Path, before: int, after: int, kind: str
) -> None:
    first = spawn(before, reader, str(tmp_path / "run"), 3, kind)
    checkpoint = str(newest(tmp_path / "run/checkpoints")[0])
    rest = spawn(after, reader, str(tmp_path / "run"), 1000, kind, WEFT_RESUME=checkpoint)
    assert [len(seen) for seen in first] == [3] * before
    assert sorted(sample for seen in (*first, *rest) for sample in seen) == list(range(24))


class Counting(Sampler[int]):
    """An order for each of its epochs, which it counts."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class ByPython(Counting):
    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(12), 12))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(12).tolist()


def goes_on(folder: str, kind: str, steps: int) -> list[tuple[list[int], float]]:
    """Two epochs and more; by step, the samples of this process and a random number that the loop draws."""
    run = weft.init(out=folder, steps=steps, save_every=1)
    model: Any = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
    own = torch.Generator().manual_seed(5)
    run.distribute(model, optimizer, own)
    samples = TensorDataset(torch.arange(12.0).view(12, 1))
    loaders: dict[str, Any] = {
        "counting": DataLoader(samples, batch_size=1, sampler=Counting()),
        "python": DataLoader(samples, batch_size=1, sampler=ByPython()),
        "endless": DataLoader(samples, batch_size=1, sampler=Endless()),
        "list": [(x,) for x in torch.randperm(12, generator=own).view(12, 1, 1).float()],
    }
    seen = []
    for _ in range(3):
        if kind == "zip":
            one, two = (DataLoader(samples, batch_size=1, shuffle=True) for _ in range(2))
            passes = zip(run.shard(one), run.shard(two), strict=True)
        elif kind == "new lists":  # from the loop's own random numbers, and from the worker's
            order = torch.randperm(12, generator=own)
            order = order if run.workers > 1 else order[torch.randperm(12)]
            passes = zip(run.shard([(x,) for x in order.view(12, 1, 1).float()]), strict=True)
        else:
            passes = zip(run.shard(loaders[kind]), strict=True)
        for taken in passes:
            noise = torch.rand(()).item() + torch.rand((), generator=own).item() + random.random()
            (sum(model(x).sum() for (x,) in taken) * noise).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(([int(x) for (x,) in taken], noise))
            if kind == "endless" and run.step * run.workers % 12 == 0:
                break
    run.close()
    return seen


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", ["counting", "python", "endless", "list", "zip", "new lists"])
def test_data_goes_on_where_it_was(tmp_path: Path, kind: str, processes: int) -> None:
    """As an uninterrupted run has it, from within the second epoch on."""
    whole = spawn(processes, goes_on, str(tmp_path / "whole"), kind, 32 // processes)
    stop = 16 // processes
    spawn(processes, goes_on, str(tmp_path / "run"), kind, stop)
    checkpoint = str(newest(tmp_path / "run/checkpoints")[0])
    rest = spawn(processes, goes_on, str(tmp_path / "run"), kind, 32 // processes, WEFT_RESUME=checkpoint)
    for mine, theirs in zip(rest, whole, strict=True):
        assert mine == theirs[stop:]
