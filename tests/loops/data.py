"""Training loops as people write them: data and batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, get_worker_info

from tests.loops.common import (
    BATCH,
    INPUTS,
    MLP,
    OUTPUTS,
    State,
    batches_of,
    begin,
    data,
    fit,
    generator,
    loader,
    loop,
    mse,
    seed,
    sgd,
    state,
    update,
)
from tests.loops.ground import Ground


@loop
def last_smaller(ground: Ground) -> State:
    """The last batch is smaller, and some workers have none."""
    model = MLP()
    return fit(ground, model, sgd(model), batches=loader(ground, 4, extra=2))


@loop
def last_missing(ground: Ground) -> State:
    """The last joined batch lacks a worker's part."""
    model = MLP()
    return fit(ground, model, sgd(model), batches=loader(ground, 4, extra=3))


@loop
def tiny_data(ground: Ground) -> State:
    """Two samples in all."""
    model = MLP()
    pairs = TensorDataset(*(tensor[:2] for tensor in data(1, 1).tensors))
    return fit(ground, model, sgd(model), batches=DataLoader(pairs, batch_size=BATCH))


def fit_accumulating(ground: Ground, sizes: Iterable[int]) -> State:
    """Two micro-batches a step."""
    model, optimizer = begin(ground)
    for index, (x, y) in enumerate(ground.shard(batches_of(sizes))):
        last = ground.step_of(index) % 2 == 1
        with contextlib.nullcontext() if last else ground.accumulate():
            (mse(model(x), y) / 2).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


@loop
def acc_uneven(ground: Ground) -> State:
    """Micro-batches of a step are uneven, but equal among the workers."""
    sizes = [3, 3, 1, 1, 4, 4, 2, 2, 3, 3, 5, 5] if ground.workers == 2 else [3] * 12
    return fit_accumulating(ground, sizes)


@loop
def acc_uneven2(ground: Ground) -> State:
    """Micro-batches of a step are uneven among the workers."""
    return fit_accumulating(ground, [3, 2, 1, 4] * 3)


@loop
def break_early(ground: Ground) -> State:
    """Each epoch ends before its loader does."""
    model, optimizer = begin(ground)
    for _ in range(3):
        for index, (x, y) in enumerate(ground.shard(loader(ground, 5))):
            update(model, optimizer, x, y)
            if ground.step_of(index) == 2 and ground.ends_step(index):
                break
    return state(model)


@loop
def dict_loader(ground: Ground) -> State:
    """Batches that are nested dicts and lists."""
    rows = [{"in": {"x": x}, "t": [y, torch.tensor(1.0)]} for x, y in data(6, ground.workers)]
    model, optimizer = begin(ground)
    for batch in ground.shard(DataLoader(rows, batch_size=BATCH)):
        update(model, optimizer, batch["in"]["x"], batch["t"][0])
    return state(model)


@loop
def seq_first(ground: Ground) -> State:
    """Batches (time, batch, features) of different lengths, in a list."""
    seed()
    model: Any = nn.Linear(INPUTS, OUTPUTS)
    model, optimizer = ground.distribute(model, sgd(model))
    stream, lengths = generator(2), (4, 8, 2, 6, 5, 3)
    inputs = [torch.randn(length, BATCH, INPUTS, generator=stream) for length in lengths]
    batches = [(x, torch.randn(BATCH, OUTPUTS, generator=stream)) for x in inputs]
    if ground.plain:
        for first in range(0, len(batches), ground.workers):
            group = batches[first : first + ground.workers]
            torch.cat([((model(x).mean(0) - y) ** 2).mean(1) for x, y in group]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        for x, y in ground.shard(batches, samples=lambda batch: batch[0].shape[1]):
            mse(model(x).mean(0), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


@loop
def token_mean(ground: Ground) -> State:
    """A mean over tokens that leaves out padding."""
    seed()
    model: Any = nn.Sequential(nn.Embedding(8, 5), nn.Linear(5, 8))
    count, stream = 6 * ground.workers * BATCH, generator(2)
    tokens, targets = (torch.randint(0, 8, (count, 5), generator=stream) for _ in range(2))
    lengths = torch.randint(1, 6, (count,), generator=stream)
    targets[torch.arange(5) >= lengths[:, None]] = -100
    model, optimizer = ground.distribute(model, sgd(model))
    sentences = DataLoader(TensorDataset(tokens, targets), batch_size=BATCH)
    for x, y in ground.shard(sentences, samples=lambda batch: (batch[1] != -100).sum()):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def sum_loss(ground: Ground) -> State:
    """A loss that is a sum over the batch."""
    model = MLP()
    return fit(ground, model, sgd(model, lr=0.01), loss=lambda o, y: ((o - y) ** 2).sum(), reduction="sum")


def fit_epochs(ground: Ground, batches: DataLoader[Any], epochs: int) -> State:
    """Several epochs over one loader."""
    model, optimizer = begin(ground)
    for _ in range(epochs):
        for x, y in ground.shard(batches):
            update(model, optimizer, x, y)
    return state(model)


@loop
def epochs_shuffle(ground: Ground) -> State:
    """Shuffled by a generator of the user's own."""
    pairs = data(4, ground.workers)
    return fit_epochs(ground, DataLoader(pairs, batch_size=BATCH, shuffle=True, generator=generator(9)), 3)


@loop
def loader_workers(ground: Ground) -> State:
    """Shuffled, read by two processes, with a smaller last batch."""
    pairs = data(4, ground.workers, extra=2)
    shuffled = DataLoader(pairs, batch_size=BATCH, shuffle=True, generator=generator(9), num_workers=2)
    return fit_epochs(ground, shuffled, 2)


class Stream(IterableDataset[Any]):
    """A dataset without a length."""

    def __init__(self, workers: int) -> None:
        self.pairs = data(4, workers, extra=2)

    def __iter__(self) -> Iterator[Any]:
        reader = get_worker_info()
        first, stride = (reader.id, reader.num_workers) if reader else (0, 1)
        return (self.pairs[index] for index in range(first, len(self.pairs), stride))


@loop
def iterable(ground: Ground) -> State:
    """A loader without a length."""
    model = MLP()
    return fit(ground, model, sgd(model), batches=DataLoader(Stream(ground.workers), batch_size=BATCH))


class Permuted(Sampler[int]):
    """Another order in each epoch."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(self.count, generator=generator(self.epoch)).tolist())


@loop
def own_sampler(ground: Ground) -> State:
    """A sampler of the user's own, which counts epochs."""
    pairs = data(4, ground.workers)
    return fit_epochs(ground, DataLoader(pairs, batch_size=BATCH, sampler=Permuted(len(pairs))), 3)


class Changed(DataLoader[Any]):
    """A loader of the user's own, which changes the batches."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield x * 2, y + 1


@loop
def loader_subclass(ground: Ground) -> State:
    """A subclass of DataLoader with an __iter__ of its own."""
    model = MLP()
    return fit(ground, model, sgd(model), batches=Changed(data(6, ground.workers), batch_size=BATCH))


@loop
def reuse_batch(ground: Ground) -> State:
    """Two steps with each batch."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        for _ in range(2):
            update(model, optimizer, x, y)
    return state(model)
