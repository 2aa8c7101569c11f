"""Training loops with BatchNorm: every worker normalises by its own batch; the running statistics are worker 0's."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.process.loop_grounds import WORKERS, Batch, Trained, batches, dataset, fit, mse, sgd, state_of


def normed() -> nn.Sequential:
    torch.manual_seed(4)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def batchnorm(run: Any) -> dict[str, Any]:
    model = normed()
    return fit(run, model, sgd(model), run.shard(batches()))


def batchnorm_accumulated(run: Any) -> dict[str, Any]:
    model = normed()
    model, optimizer = run.distribute(model, sgd(model))
    for i, (x, y) in enumerate(run.shard(batches())):
        loss = mse(model(x), y)
        with run.accumulate() if i % 3 < 2 else contextlib.nullcontext():
            (loss / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model)


def batchnorm_own(run: Any) -> dict[str, Any]:
    """Worker 0 runs out of batches: from there on the running statistics stay as they are."""
    model = normed()
    return fit(run, model, sgd(model), run.own(normed_loaders()))


def normed_loaders() -> list[DataLoader[Any]]:
    x, y = dataset().tensors
    ends = [0, 8, 20, 28, 45]
    return [DataLoader(TensorDataset(x[a:b], y[a:b]), batch_size=3) for a, b in itertools.pairwise(ends)]


def normed_sizes() -> list[list[int]]:
    sizes = [[len(x) for x, _ in loader] for loader in normed_loaders()]
    return [list(row) for row in itertools.zip_longest(*sizes, fillvalue=0)]


def norm_by_hand(steps: Sequence[Sequence[Sequence[Batch | None]]]) -> Trained:
    """Each worker's micro-batches from the same buffers, gradients added by share, worker 0's buffers kept."""
    model = normed()
    optimizer = sgd(model)
    losses = []
    for micro in steps:
        start = [b.clone() for b in model.buffers()]
        sums = [0.0] * len(micro)
        samples = [sum(len(batch[0]) for batch in group if batch is not None) for group in micro]
        for worker in range(WORKERS):
            set_buffers(model, start)
            for at, group in enumerate(micro):
                if (batch := group[worker]) is not None:
                    share = len(batch[0]) / samples[at]
                    loss = mse(model(batch[0]), batch[1])
                    (loss * share / len(micro)).backward()
                    sums[at] += loss.item() * share
            if worker == 0:
                first = [b.clone() for b in model.buffers()]
        set_buffers(model, first)
        optimizer.step()
        optimizer.zero_grad()
        losses += sums
    return state_of(model), losses


def set_buffers(model: nn.Module, values: Sequence[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def batchnorm_by_hand() -> Trained:
    groups = grouped(list(batches()), WORKERS)
    return norm_by_hand([[group] for group in groups])


def batchnorm_accumulated_by_hand() -> Trained:
    return norm_by_hand(grouped(grouped(list(batches()), WORKERS), 3))


def batchnorm_own_by_hand() -> Trained:
    return norm_by_hand([[group] for group in itertools.zip_longest(*normed_loaders())])


def grouped(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[at : at + size] for at in range(0, len(items), size)]
