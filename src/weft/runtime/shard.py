"""Batches, dealt to the logical workers in turn: batch t·n + r of the user's loader is worker r's at step t.

The batches of one step, joined, are what one process with an n times larger batch would take. Where they differ in
size, or run out for some workers, each gradient is weighted by its batch's share; a worker without a batch computes
on another's with share 0, so that every loop runs the same number of times and nobody waits for a message.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from weft.errors import LoopError, UserError
from weft.runtime.turns import Turns, stream_seed
from weft.transport.collective import Processes

Dealt = tuple[Any, float, int]
"""A batch, its share of the step's joined batch, and how many samples it has."""


@dataclass(frozen=True, kw_only=True)
class Dealer:
    """What dealing needs to know of the run."""

    workers: int
    turns: Turns
    transport: Processes
    seed: int

    def feeds(self, loader: Iterable[Any], own: bool) -> list[Iterator[Dealt]]:
        """One stream of batches for each carried worker, for one epoch."""
        ranks = self.turns.ranks
        if own:
            if len(ranks) > 1:
                raise UserError(
                    "own=True gives each process its own data, but this one carries several workers; use one each"
                )
            return [self._own(loader)]
        if isinstance(loader, DataLoader):
            if isinstance(loader.sampler, DistributedSampler):
                raise UserError(
                    "the loader already has a DistributedSampler; give run.shard() a plain loader, or say own=True"
                )
            if not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None:
                return self._indexed(loader)
        copies = itertools.tee(self._groups(loader), len(ranks))
        return [_picked(groups, rank, self.workers) for groups, rank in zip(copies, ranks, strict=True)]

    def _order(self) -> int:
        """A seed for the order of an epoch: the same for all workers, another when steps have been taken."""
        return stream_seed(self.seed, -1 - self.turns.step)

    def _indexed(self, loader: DataLoader[Any]) -> list[Iterator[Dealt]]:
        """A map-style loader: deal its sampler's batches, so that each worker loads only its own."""
        assert loader.batch_sampler is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._order())
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as the loader itself would
            batches = [list(batch) for batch in loader.batch_sampler]
        if loader.drop_last:
            batches = batches[: len(batches) // self.workers * self.workers]
        groups = [batches[at : at + self.workers] for at in range(0, len(batches), self.workers)]
        return [self._loaded(loader, groups, rank) for rank in self.turns.ranks]

    def _loaded(self, loader: DataLoader[Any], groups: Sequence[Any], rank: int) -> Iterator[Dealt]:
        mine = [group[rank] if rank < len(group) else group[0] for group in groups]
        random = torch.Generator().manual_seed(stream_seed(self._order(), rank))
        same: dict[str, Any] = {"num_workers": loader.num_workers, "collate_fn": loader.collate_fn}
        same |= {"pin_memory": loader.pin_memory}
        same |= {"timeout": loader.timeout, "worker_init_fn": loader.worker_init_fn, "generator": random}
        same |= {"multiprocessing_context": loader.multiprocessing_context, "prefetch_factor": loader.prefetch_factor}
        for group, batch in zip(groups, DataLoader(loader.dataset, batch_sampler=mine, **same), strict=True):
            yield batch, *_share([len(indices) for indices in group], rank, self.workers)

    def _groups(self, loader: Iterable[Any]) -> Iterator[list[Any]]:
        """Any other loader: every process goes through all of it, with the same random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._order())
            source, state = iter(loader), torch.get_rng_state()
        while True:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                group = list(itertools.islice(source, self.workers))
                state = torch.get_rng_state()
            if not group:
                return
            yield group

    def _own(self, loader: Iterable[Any]) -> Iterator[Dealt]:
        """Each process brings its own batches; their numbers and sizes are exchanged here, once an epoch."""
        try:
            count = len(loader)  # type: ignore[arg-type]
        except TypeError:
            raise UserError("run.shard(own=True) needs a loader with a length; wrap it so that len() works") from None
        counts = [row[0] for row in self.transport.tell([count])]
        if min(counts) == 0:
            raise UserError(f"worker {counts.index(0)} has no batch at all; give every worker some data")
        source = iter(loader)
        batch = next(source)
        mine, sure = _sizes(loader, count, batch)
        rows = self.transport.tell([*mine, *[0] * (max(counts) - count)])
        for at in range(max(counts)):
            if not sure and at < count and samples(batch) != mine[at]:
                raise LoopError(
                    f"batch {at} has {samples(batch)} samples, but the first had {mine[at]}; give run.shard() "
                    "a DataLoader or a list, whose sizes are known ahead"
                )
            yield batch, *_share([row[at] for row in rows], self.turns.ranks[0], self.workers)
            batch = next(source, batch)


def _share(sizes: Sequence[int], rank: int, workers: int) -> tuple[float, int]:
    """A worker's share of a step's samples, and how many it has; exactly 1/n where all are equal."""
    mine = sizes[rank] if rank < len(sizes) else 0
    if len(sizes) == workers and len(set(sizes)) == 1:
        return 1.0 / workers, mine
    return mine / sum(sizes), mine


def _sizes(loader: Iterable[Any], count: int, first: Any) -> tuple[list[int], bool]:
    """How many samples each batch will have, and whether that is sure; a guess is: as many as the first."""
    if isinstance(loader, Sequence):
        return [samples(batch) for batch in loader], True
    size = getattr(loader, "batch_size", None)
    sampler: Any = getattr(loader, "sampler", None)
    if not size or not hasattr(sampler, "__len__"):
        return [samples(first)] * count, False
    return [size] * (count - 1) + [min(size, len(sampler) - (count - 1) * size)], True


def _picked(groups: Iterator[list[Any]], rank: int, workers: int) -> Iterator[Dealt]:
    for group in groups:
        yield group[rank] if rank < len(group) else group[0], *_share([samples(b) for b in group], rank, workers)


def samples(batch: Any) -> int:
    """How many samples a batch has: the first dimension of its first tensor; 1 where there is none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    parts: Iterable[Any] = (
        batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    )
    for part in parts:
        return samples(part)
    return 1


class Shard:
    """What `run.shard(loader)` gives: iterate it once per epoch, as the loader itself."""

    def __init__(self, dealer: Dealer, loader: Iterable[Any], epochs: int | None, own: bool, limit: Any) -> None:
        self.dealer, self.loader, self.epochs, self.own, self.limit = dealer, loader, epochs, own, limit

    def __len__(self) -> int:
        batches = len(self.loader)  # type: ignore[arg-type]
        return batches if self.own else -(-batches // self.dealer.workers)

    def __iter__(self) -> Iterator[Any]:
        epochs = itertools.count() if self.epochs is None else range(self.epochs)
        for _ in epochs:
            feeds = self.dealer.feeds(self.loader, self.own)
            dealt = 0
            for batch in self._one(feeds):
                dealt += 1
                yield batch
            if self.limit():
                return
            if not dealt:
                raise LoopError("the loader gave no batch; a smaller batch size or drop_last=False may help")

    def _one(self, feeds: list[Iterator[Dealt]]) -> Iterator[Any]:
        turns = self.dealer.turns
        if turns.count > 1 and turns.within:
            raise LoopError(
                "the last epoch ended inside accumulate(), and of the several workers that this process carries only "
                "the first had got there; let an epoch hold whole steps, or give each worker a process"
            )
        while not (self.limit() and turns.turn == 0):
            got = next(feeds[turns.turn], None)
            if got is None:
                return
            batch, share, count = got
            turns.deal(share, count)
            yield batch
