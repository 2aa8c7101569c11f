"""Batches, dealt to the logical workers in turn: batch t·n + r of the user's loader is worker r's at step t.

The batches of one step, joined, are what one process with an n times larger batch would take. Where they differ in
size, or run out for some workers, each gradient is weighted by its batch's share; a worker without a batch computes
on another's with share 0, so that every loop runs the same number of times and nobody waits for a message.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from weft.errors import LoopError, UserError
from weft.runtime.reading import Epoch, Reading
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
    reading: Reading
    seed: int

    def feeds(self, loader: Iterable[Any], own: bool, epoch: Epoch) -> list[Iterator[Dealt]]:
        """One stream of batches for each carried worker: what an epoch has not consumed yet."""
        ranks = self.turns.ranks
        if own:
            if len(ranks) > 1:
                raise UserError(
                    "own=True gives each process its own data, but this one carries several workers; use one each"
                )
            if epoch.consumed and self.reading.resized:
                raise UserError(
                    "own=True gives each worker its own data, and the checkpoint has another number of workers; resume "
                    "with as many"
                )
            return [self._own(loader, epoch)]
        if isinstance(loader, DataLoader):
            if isinstance(loader.sampler, DistributedSampler):
                raise UserError(
                    "the loader already has a DistributedSampler; give run.shard() a plain loader, or say own=True"
                )
            if not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None:
                return self._indexed(loader, epoch)
        copies = itertools.tee(self._groups(loader, epoch), len(ranks))
        return [_picked(groups, rank, self.workers) for groups, rank in zip(copies, ranks, strict=True)]

    def _order(self, epoch: Epoch) -> int:
        """A seed for the order of an epoch: the same for all workers, another when steps have been taken."""
        return stream_seed(self.seed, -1 - epoch.began)

    def _indexed(self, loader: DataLoader[Any], epoch: Epoch) -> list[Iterator[Dealt]]:
        """A map-style loader: deal its sampler's batches, so that each worker loads only its own."""
        assert loader.batch_sampler is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._order(epoch))
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as the loader itself would
            batches = [list(batch) for batch in loader.batch_sampler][epoch.consumed :]
        if loader.drop_last:
            batches = batches[: len(batches) // self.workers * self.workers]
        groups = [batches[at : at + self.workers] for at in range(0, len(batches), self.workers)]
        order, first = self._order(epoch), epoch.consumed  # as they are now: a feed may start when others have run
        return [self._loaded(loader, groups, rank, order, first + rank) for rank in self.turns.ranks]

    def _loaded(
        self, loader: DataLoader[Any], groups: Sequence[Any], rank: int, order: int, first: int
    ) -> Iterator[Dealt]:
        mine: list[Any] = [group[rank] if rank < len(group) else group[0] for group in groups]
        dataset, prepare = loader.dataset, loader.worker_init_fn
        if loader.num_workers:
            mine = [[stream_seed(order, first + at * self.workers), *batch] for at, batch in enumerate(mine)]
            dataset, prepare = Seeded(dataset), Unwrapped(prepare)
        draws = torch.Generator().manual_seed(stream_seed(order, rank))
        same: dict[str, Any] = {"num_workers": loader.num_workers, "collate_fn": loader.collate_fn}
        same |= {"pin_memory": loader.pin_memory}
        same |= {"timeout": loader.timeout, "worker_init_fn": prepare, "generator": draws}
        same |= {"multiprocessing_context": loader.multiprocessing_context, "prefetch_factor": loader.prefetch_factor}
        for group, batch in zip(groups, DataLoader(dataset, batch_sampler=mine, **same), strict=True):
            yield batch, *_share([len(indices) for indices in group], rank, self.workers)

    def _groups(self, loader: Iterable[Any], epoch: Epoch) -> Iterator[list[Any]]:
        """Any other loader: every process goes through all of it, with the same random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._order(epoch))
            source = iter(loader)
            _skip(source, epoch.consumed)
            state = torch.get_rng_state()
        return self._grouped(source, state)

    def _grouped(self, source: Iterator[Any], state: Tensor) -> Iterator[list[Any]]:
        while True:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                group = list(itertools.islice(source, self.workers))
                state = torch.get_rng_state()
            if not group:
                return
            yield group

    def _own(self, loader: Iterable[Any], epoch: Epoch) -> Iterator[Dealt]:
        """Each process brings its own batches; their numbers and sizes are exchanged here, once an epoch."""
        try:
            count = len(loader)  # type: ignore[arg-type]
        except TypeError:
            raise UserError("run.shard(own=True) needs a loader with a length; wrap it so that len() works") from None
        counts = [row[0] for row in self.transport.tell([count])]
        if min(counts) == 0:
            raise UserError(f"worker {counts.index(0)} has no batch at all; give every worker some data")
        source = iter(loader)
        first = next(source)
        mine, sure = _sizes(loader, count, first)
        rows = self.transport.tell([*mine, *[0] * (max(counts) - count)])
        done = epoch.consumed // self.workers
        before = [first, *_skip(source, done - 1)][-1] if done else None
        rest = source if done else itertools.chain([first], source)
        return self._owned(rest, before, rows, mine if not sure else None, done)

    def _owned(
        self, source: Iterator[Any], batch: Any, rows: list[list[int]], guessed: list[int] | None, done: int
    ) -> Iterator[Dealt]:
        """Batches from number `done` on; one that has run out goes on with its last, which counts for nothing."""
        for at in range(done, len(rows[0])):
            batch = next(source, batch)
            if guessed and at < len(guessed) and samples(batch) != guessed[at]:
                raise LoopError(
                    f"batch {at} has {samples(batch)} samples, but the first had {guessed[at]}; give run.shard() "
                    "a DataLoader or a list, whose sizes are known ahead"
                )
            yield batch, *_share([row[at] for row in rows], self.turns.ranks[0], self.workers)


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


def _skip(source: Iterator[Any], count: int) -> list[Any]:
    """Go past so many; returns the last of them, if there is one."""
    return list(deque(itertools.islice(source, max(0, count)), maxlen=1))


class Seeded(Dataset[Any]):
    """A dataset in a loader's own process: each batch begins with a seed, so its random numbers are its own.

    They depend neither on which process loads the batch nor on what was loaded before it.
    """

    def __init__(self, inner: Dataset[Any]) -> None:
        self.inner = inner

    def __getitems__(self, batch: list[Any]) -> list[Any]:
        seed, *indices = batch
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        whole = getattr(self.inner, "__getitems__", None)
        return list(whole(indices)) if whole else [self.inner[index] for index in indices]


class Unwrapped:
    """A loader's process sees the user's own dataset."""

    def __init__(self, prepare: Callable[[int], None] | None) -> None:
        self.prepare = prepare

    def __call__(self, number: int) -> None:
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", info.dataset.inner)  # type: ignore[attr-defined]
        if self.prepare is not None:
            self.prepare(number)


class Shard:
    """What `run.shard(loader)` gives: iterate it once per epoch, as the loader itself."""

    def __init__(self, dealer: Dealer, loader: Iterable[Any], epochs: int | None, own: bool, between: Between) -> None:
        self.dealer, self.loader, self.epochs, self.own, self.between = dealer, loader, epochs, own, between

    def __len__(self) -> int:
        batches = len(self.loader)  # type: ignore[arg-type]
        return batches if self.own else -(-batches // self.dealer.workers)

    def __iter__(self) -> Iterator[Any]:
        reading, turns = self.dealer.reading, self.dealer.turns
        for _ in itertools.count() if self.epochs is None else range(self.epochs):
            epoch = reading.begin(turns.step, self.loader)
            if epoch is None:
                continue
            feeds = self.dealer.feeds(self.loader, self.own, epoch)
            try:
                yield from self._one(feeds, epoch)
            except GeneratorExit:  # the loop has left it
                reading.end(epoch, turns.step)
                raise
            if self.between.enough():
                return
            if not epoch.consumed:
                raise LoopError("the loader gave no batch; a smaller batch size or drop_last=False may help")
            reading.end(epoch, turns.step)

    def _one(self, feeds: list[Iterator[Dealt]], epoch: Epoch) -> Iterator[Any]:
        turns = self.dealer.turns
        if turns.count > 1 and turns.within:
            raise LoopError(
                "the last epoch ended inside accumulate(), and of the several workers that this process carries only "
                "the first had got there; let an epoch hold whole steps, or give each worker a process"
            )
        while not (self.between.enough() and turns.turn == 0):
            self.between.resumed(epoch)
            got = next(feeds[turns.turn], None)
            if got is None:
                return
            batch, share, count = got
            turns.deal(share, count)
            if turns.turn == 0:
                epoch.consumed += self.dealer.workers
            before = turns.step
            yield batch
            if turns.step > before:
                self.between.stepped(epoch)


class Between(Protocol):
    """What the run does between a loop's steps."""

    def enough(self) -> bool:
        """Whether the run has taken all its steps."""

    def resumed(self, epoch: Epoch) -> None:
        """The loop asks for a batch. An earlier part of the run may have stopped just here."""

    def stepped(self, epoch: Epoch) -> None:
        """A step is over, with all that the loop does after it."""
