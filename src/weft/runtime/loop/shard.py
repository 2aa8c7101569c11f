"""The user's iterable: the epochs of a loader, dealt batch by batch, with the run's actions between the steps."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from weft.errors import LoopError, UserError
from weft.runtime.loop.data_position import Epoch
from weft.runtime.loop.data_sharding import Dealer, Dealt
from weft.runtime.loop.sample_shares import Count


class BetweenSteps(Protocol):
    """Callbacks of the run between the steps of a loop."""

    def enough(self) -> bool:
        """Whether the run has taken all its steps."""

    def resumed(self, epoch: Epoch) -> None:
        """The loop requests the first batch of an iteration. An earlier attempt may have stopped within it."""

    def stepped(self, epoch: Epoch) -> None:
        """A step is complete, including everything that the loop does after it."""

    def untrained(self) -> None:
        """An iteration is over without a step and without an exchange."""

    def passed(self) -> None:
        """An iteration with exchanges is over; all processes reach this after the same number of exchanges."""

    def finish(self) -> None:
        """The loop has taken its last step. A collective call, which does nothing if it was made before."""


class Shard:
    """The result of `run.shard(loader)`: iterate it once per epoch, like the loader itself."""

    def __init__(
        self,
        dealer: Dealer,
        loader: Iterable[Any],
        epochs: int | None,
        own: bool,
        lifecycle: BetweenSteps,
        count: Count | None = None,
        moved: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.dealer, self.loader, self.epochs, self.own, self.lifecycle = dealer, loader, epochs, own, lifecycle
        self.count, self.moved = count, moved

    def __len__(self) -> int:
        batches, workers = len(self.loader), self.dealer.workers  # type: ignore[arg-type]
        if self.own:
            return batches
        whole = isinstance(self.loader, DataLoader) and self.loader.drop_last
        return batches // workers if whole else -(-batches // workers)

    def __iter__(self) -> Iterator[Any]:
        dealer = self.dealer
        position, passes = dealer.position, dealer.passes
        if self.count is not None and passes.sums:
            raise UserError(
                'samples= weighs a mean, but reduction="sum" adds gradients undivided; leave one of them out'
            )
        if not torch.is_grad_enabled():
            raise LoopError(
                "run.shard() deals batches to train on, but gradients are disabled; evaluate with run.evaluate(loader)"
            )
        for number in itertools.count() if self.epochs is None else range(self.epochs):
            for skipped in position.uncounted(self.loader):
                dealer.pass_by(self.loader, self.own, skipped)
            epoch = position.begin(passes.step, self.loader, repeats=number > 0)
            if epoch.over:
                dealer.pass_by(self.loader, self.own, epoch)
                position.skipped()
                continue
            with position.entering(epoch, self.loader):
                feeds = dealer.feeds(self.loader, self.own, epoch)
            before = passes.step, passes.exchanges
            try:
                yield from self._one(feeds, epoch)
            except GeneratorExit:  # the loop has broken out of the epoch
                passes.passed(id(epoch))
                position.end(epoch, passes.step)
                raise
            passes.passed(id(epoch))
            if (passes.step, passes.exchanges) == before and not epoch.again:
                self.lifecycle.untrained()
            if passes.exchanges > before[1]:
                self.lifecycle.passed()
            if self.lifecycle.enough():
                return
            if not epoch.consumed + epoch.out:
                raise LoopError("the loader gave no batch; use a smaller batch size, or drop_last=False")
            position.end(epoch, passes.step)
            if passes.exchanges > before[1] and position.finished:
                self.lifecycle.finish()

    def _one(self, feeds: list[Iterator[Dealt]], epoch: Epoch) -> Iterator[Any]:
        passes = self.dealer.passes
        if passes.count > 1 and passes.within:
            raise LoopError(
                "the last epoch ended inside accumulate(), and only the first of the several workers in this process "
                "had reached it; let an epoch consist of whole steps, or give each worker a process"
            )
        ahead: deque[Dealt] = deque()
        self.lifecycle.resumed(epoch)
        while not (self.lifecycle.enough() and passes.pass_index == 0):
            got = (
                next(feeds[passes.pass_index], None) if self.count is None else self._counted(feeds, self.count, ahead)
            )
            if got is None:
                return
            batch, share, count, joined, fingerprint = got
            passes.deal(share, count, joined, id(epoch), fingerprint)
            if passes.pass_index == 0:
                epoch.deal(self.dealer.workers, passes.step)
            before = passes.step
            yield self.moved(batch)
            if passes.step > before:
                if self.lifecycle.enough():
                    self.lifecycle.finish()
                self.lifecycle.stepped(epoch)

    def _counted(self, feeds: list[Iterator[Dealt]], count: Count, ahead: deque[Dealt]) -> Dealt | None:
        """The next batch of the present worker; those of all logical workers of this process are counted together."""
        if self.dealer.passes.pass_index == 0:
            if ahead:
                raise LoopError(
                    "a batch was skipped, but with samples= the workers in this process count the batches of a step "
                    "together; use every batch, or give each worker a process"
                )
            ahead.extend(self.dealer.counted(feeds, count))
        return ahead.popleft() if ahead else None
