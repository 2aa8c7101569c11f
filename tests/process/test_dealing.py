"""Batches are dealt to workers: every sample once an epoch, on any number of processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import weft
from tests.process.harness import spawn
from tests.process.loop_grounds import DENSE, WORKERS


class Shuffled(IterableDataset[Tensor]):
    """Draws its order from torch's global random numbers, as any loader may."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randperm(48))


def numbers(kind: str) -> Iterable[Tensor]:
    numbers: Any = torch.arange(48)
    match kind:
        case "shuffle":
            return DataLoader(numbers, batch_size=2, shuffle=True)
        case "generator":
            return DataLoader(numbers, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
        case "batch_sampler":
            sampler = torch.utils.data.RandomSampler(numbers)
            return DataLoader(numbers, batch_sampler=torch.utils.data.BatchSampler(sampler, 2, False))
        case "batch_size=None":
            return DataLoader(numbers, batch_size=None, shuffle=True)
        case "iterable":
            return DataLoader(Shuffled(), batch_size=2)
    raise AssertionError(kind)


KINDS = ("shuffle", "generator", "batch_sampler", "batch_size=None", "iterable")


def deal(kinds: Sequence[str]) -> list[list[dict[int, list[int]]]]:
    """For each kind of loader and each of three epochs (one, then two in one): what each worker was dealt."""
    store, rows = os.environ["WEFT_STORE"], []
    for at, kind in enumerate(kinds):
        os.environ["WEFT_STORE"] = f"{store}-{at}"
        run = weft.init(DENSE)
        model = nn.Linear(1, 1)
        model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader, dealt = numbers(kind), []
        for feed in (run.shard(loader), run.shard(loader, epochs=2)):
            for batch in feed:
                dealt.append((run.step, run.rank, batch.view(-1).tolist()))
                model(torch.rand(1, 1)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        per_epoch = run.step // 3
        epochs: list[dict[int, list[int]]] = [{} for _ in range(3)]
        for step, rank, items in dealt:
            epochs[step // per_epoch].setdefault(rank, []).extend(items)
        rows.append(epochs)
        run.close()
    return rows


def test_every_sample_is_dealt_once_per_epoch_and_epochs_differ() -> None:
    """However many processes there are, and wherever a loader takes its random numbers from."""
    outcomes = [spawn(processes, deal, KINDS, workers=WORKERS) for processes in (1, 3, 4)]
    for at, kind in enumerate(KINDS):
        shapes = []
        for rows in outcomes:
            shapes.append([{r: v for row in rows for r, v in row[at][e].items()} for e in range(3)])
            for epoch in shapes[-1]:
                assert sorted(epoch) == list(range(WORKERS))
                assert sorted(itertools.chain.from_iterable(epoch.values())) == list(range(48)), kind
        assert shapes[0] == shapes[1] == shapes[2], kind
        assert all(one != other for one, other in itertools.combinations(shapes[0], 2)), kind
