"""Deals batches to the logical workers in turn: batch t·n + r of the user's loader belongs to worker r at step t.

The joined batches of one step are those of a single process with an n times larger batch. If they differ in size, or
run out for some workers, each gradient is weighted by its batch's share; a worker without a batch computes on another
one with share 0, so that every loop runs the same number of times and no worker waits for a missing message.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from weft.errors import LoopError, UserError
from weft.runtime.loop import batch_fingerprint as fingerprint
from weft.runtime.loop.data_position import DataPosition, Epoch
from weft.runtime.loop.logical_workers import Passes
from weft.runtime.loop.rng import DataRng, seed_everything, stream_seed
from weft.runtime.loop.sample_counts import Share
from weft.runtime.loop.sample_shares import Count, Shares, counted, share_of
from weft.transport.collective import Processes

Dealt = tuple[Any, Share, int, Share, int]
"""A batch, its share of the step's joined batch, its samples, those of the joined batch, and the step's fingerprint."""
Group = tuple[list[Any], int]
"""The batches of one step, or their indices, and a fingerprint that is equal in every process."""

_AHEAD = 64
"""The number of steps whose indices are read from a sampler at once."""
_STATELESS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True, kw_only=True)
class Dealer:
    """The parts of the run that dealing depends on."""

    workers: int
    passes: Passes
    transport: Processes
    position: DataPosition
    seed: int

    def feeds(self, loader: Iterable[Any], own: bool, epoch: Epoch) -> list[Iterator[Dealt]]:
        """One stream of batches for each logical worker of this process: the unconsumed rest of an epoch."""
        ranks = self.passes.ranks
        if own:
            if len(ranks) > 1:
                raise UserError(
                    "own=True gives each process its own data, but this one carries several workers; use one per worker"
                )
            if epoch.consumed and self.position.resized:
                raise UserError(
                    "own=True gives each worker its own data, but the checkpoint has another number of workers; resume "
                    "with as many"
                )
            return [self._own(loader, epoch)]
        if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
            raise UserError(
                "the loader already has a DistributedSampler; give run.shard() a plain loader, or pass own=True"
            )
        if has_indices(loader):
            return self._indexed(loader, epoch)
        copies = itertools.tee(self._groups(loader, epoch), len(ranks))
        return [_picked(groups, rank, self.workers) for groups, rank in zip(copies, ranks, strict=True)]

    def _order(self, epoch: Epoch) -> int:
        """A seed for the order of an epoch: equal for all workers, and different after further steps."""
        order = stream_seed(self.seed, -1 - epoch.began)
        return stream_seed(order, epoch.beside) if epoch.beside else order

    def _indexed(self, loader: DataLoader[Any], epoch: Epoch) -> list[Iterator[Dealt]]:
        """A map-style loader: deal the batches of its sampler, so that each worker loads only its own."""
        ranks, order, first = self.passes.ranks, self._order(epoch), epoch.consumed
        copies = itertools.tee(self._indices(loader, epoch), 2 * len(ranks))
        return [
            self._loaded(loader, copies[2 * at], copies[2 * at + 1], rank, order, first + rank)
            for at, rank in enumerate(ranks)
        ]

    def _indices(self, loader: DataLoader[Any], epoch: Epoch) -> Iterator[Group]:
        """The groups of an epoch as indices; an endless sampler is read as needed."""
        assert loader.batch_sampler is not None
        draws = DataRng(self._order(epoch))
        with draws.lent():
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as the loader itself does
            source = iter(loader.batch_sampler)
            _skip(source, epoch.consumed)
        mark = self._marked(loader.batch_sampler, lambda group, _: sum(map(fingerprint.of_indices, group)))
        return self._grouped(map(list, source), loader, mark, draws, _AHEAD)

    def _loaded(
        self,
        loader: DataLoader[Any],
        ahead: Iterator[Group],
        groups: Iterator[Group],
        rank: int,
        order: int,
        first: int,
    ) -> Iterator[Dealt]:
        mine: Iterator[Any] = (group[rank] if rank < len(group) else group[0] for group, _ in ahead)
        dataset, prepare = loader.dataset, loader.worker_init_fn
        if loader.num_workers:
            mine = ([stream_seed(order, first + at * self.workers), *batch] for at, batch in enumerate(mine))
            dataset, prepare = Seeded(dataset), Unwrapped(prepare)
        draws = torch.Generator().manual_seed(stream_seed(order, rank))
        same = loading_options(loader) | {"worker_init_fn": prepare, "generator": draws}
        for batch, (group, mark) in zip(DataLoader(dataset, batch_sampler=mine, **same), groups, strict=False):
            yield batch, *share_of([len(indices) for indices in group], rank, self.workers), mark

    def _groups(self, loader: Iterable[Any], epoch: Epoch) -> Iterator[Group]:
        """Any other loader: every process reads all of it, with the same random numbers."""
        draws = DataRng(self._order(epoch)) if type(loader) not in (list, tuple) else None
        with draws.lent() if draws else contextlib.nullcontext():
            source = iter(loader)
            _skip(source, epoch.consumed)
        mark = self._marked(loader, lambda group, first: fingerprint.of_batch(group) if first else 0)
        return self._grouped(source, loader, mark, draws, 1)

    def _grouped(
        self, source: Iterator[Any], loader: Any, mark: Callable[[list[Any]], int], draws: DataRng | None, ahead: int
    ) -> Iterator[Group]:
        """Groups, read `ahead` at a time; with drop_last, a step with fewer batches than workers is dropped."""
        whole = isinstance(loader, DataLoader) and loader.drop_last
        while True:
            with draws.lent() if draws else contextlib.nullcontext():
                batches = list(itertools.islice(source, ahead * self.workers))
            for at in range(0, len(batches), self.workers):
                group = batches[at : at + self.workers]
                if len(group) == self.workers or not whole:
                    yield group, mark(group)
            if len(batches) < ahead * self.workers:
                return

    def _marked(self, loader: Any, mark: Callable[[list[Any], bool], int]) -> Callable[[list[Any]], int]:
        """Fingerprints of groups, if there are other processes to compare with; the first includes the length."""
        if self.transport.layout.processes == 1:
            return lambda group: 0
        length = _length(loader) or 0
        firsts = itertools.chain([True], itertools.repeat(False))

        def marked(group: list[Any]) -> int:
            first = next(firsts)
            return mark(group, first) + (length if first else 0)

        return marked

    def pass_by(self, loader: Iterable[Any], own: bool, epoch: Epoch) -> None:
        """Skip an epoch that an earlier attempt completed; a sampler that counts its epochs counts this one."""
        if own or not has_indices(loader) or type(loader.sampler) in _STATELESS:
            return
        groups = self._indices(loader, replace(epoch, consumed=0))
        steps = -(-epoch.consumed // self.workers)
        deque(groups if _length(loader) is not None else itertools.islice(groups, steps), maxlen=0)

    def counted(self, feeds: list[Iterator[Dealt]], count: Count) -> list[Dealt]:
        """The next batch of each logical worker, with a share that is known once all workers have sent their counts."""
        row: list[Dealt] = []
        for pass_index, feed in enumerate(feeds):
            with self.passes.stream_of(pass_index):
                row += itertools.islice(feed, 1)
        if not row:
            return []
        counts = [counted(count, batch) if n else 0.0 for batch, _, n, *_ in row]
        shares = Shares(self.transport, counts)
        return [
            (batch, functools.partial(shares.of, rank), math.ceil(mine), shares.total, mark)
            for (batch, *_, mark), rank, mine in zip(row, self.passes.ranks, counts, strict=True)
        ]

    def _own(self, loader: Iterable[Any], epoch: Epoch) -> Iterator[Dealt]:
        """Each process has its own batches; their numbers and sizes are exchanged once per epoch."""
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
        """Batches from number `done` on; a worker that has run out repeats its last batch with share 0."""
        for at in range(done, len(rows[0])):
            batch = next(source, batch)
            if guessed and at < len(guessed) and samples(batch) != guessed[at]:
                raise LoopError(
                    f"batch {at} has {samples(batch)} samples, but the first had {guessed[at]}; give run.shard() "
                    "a DataLoader or a list, whose sizes are known ahead"
                )
            yield batch, *share_of([row[at] for row in rows], self.passes.ranks[0], self.workers), 0


def loading_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """The options with which a loader loads a batch of given indices."""
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor")
    return {name: getattr(loader, name) for name in names}


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def has_indices(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether a loader's batches are those of its sampler. A loader with its own iteration is read as it is."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    kind = type(loader)
    plain = kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator
    return plain and loader.batch_sampler is not None


def _sizes(loader: Iterable[Any], count: int, first: Any) -> tuple[list[int], bool]:
    """The number of samples of each batch, and whether that is certain; the guess is the size of the first batch."""
    if isinstance(loader, Sequence):
        return [samples(batch) for batch in loader], True
    size = getattr(loader, "batch_size", None)
    sampler: Any = getattr(loader, "sampler", None)
    if not size or not hasattr(sampler, "__len__"):
        return [samples(first)] * count, False
    return [size] * (count - 1) + [min(size, len(sampler) - (count - 1) * size)], True


def _picked(groups: Iterator[Group], rank: int, workers: int) -> Iterator[Dealt]:
    for group, mark in groups:
        sizes = [samples(batch) for batch in group]
        yield group[rank] if rank < len(group) else group[0], *share_of(sizes, rank, workers), mark


def samples(batch: Any) -> int:
    """The number of samples of a batch: the first dimension of its first tensor; 1 if there is none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    parts: Iterable[Any] = (
        batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    )
    for part in parts:
        return samples(part)
    return 1


def _skip(source: Iterator[Any], count: int) -> list[Any]:
    """Skip this many items; returns the last of them, if there is one."""
    return list(deque(itertools.islice(source, max(0, count)), maxlen=1))


class Seeded(Dataset[Any]):
    """A dataset in a data-loader process: each batch is seeded, so its random numbers are its own.

    They depend neither on the process that loads the batch nor on the batches loaded before it.
    """

    def __init__(self, inner: Dataset[Any]) -> None:
        self.inner = inner

    def __getitems__(self, batch: list[Any]) -> list[Any]:
        seed, *indices = batch
        seed_everything(seed)
        whole = getattr(self.inner, "__getitems__", None)
        return list(whole(indices)) if whole else [self.inner[index] for index in indices]


class Unwrapped:
    """Shows a data-loader process the user's own dataset."""

    def __init__(self, prepare: Callable[[int], None] | None) -> None:
        self.prepare = prepare

    def __call__(self, number: int) -> None:
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", info.dataset.inner)  # type: ignore[attr-defined]
        if self.prepare is not None:
            self.prepare(number)
