"""Passes of logical workers. The user's loop belongs to one worker; a process with several runs it once for each.

A worker's pass ends with its backward. Only the last pass's backward exchanges gradients, and only then do `step`,
schedulers, scalers and clipping take effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from weft.errors import LoopError
from weft.runtime.loop.rng import rng_state, set_rng_state, stream_seed
from weft.runtime.loop.sample_counts import SampleCounts, Share
from weft.transport.layout import Layout


class Passes:
    """The passes of this process's logical workers within a step: random streams, shares, and completion."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.ranks = layout.carried()
        self.count = len(self.ranks)
        self.workers = layout.workers
        self.even = 1.0 / layout.workers
        self.pass_index = 0
        self.step = 0
        self.share = self.even
        self.accumulating = False
        self.complete = True
        """Whether no worker's pass is missing in the present step, so that `step` and followers act."""
        self.unstepped = False
        """Whether an exchange has happened without a `step` or `zero_grad` after it."""
        self.within = False
        """Whether this pass has had a backward inside `accumulate()`, and its last backward is still to come."""
        self.step_called = True
        """Whether step() was called since the last backward, with effect or without."""
        self.used: set[int] = set()
        self.samples = 0
        self.sample_counts: SampleCounts | None = None
        """Counts the samples between two merges, where a mode needs them."""
        self.before_batch: Callable[[], None] = lambda: None
        """Called when a batch is dealt."""
        self._taken = self._taken_first = 0
        self.dealt = False
        """Whether any batch has come from `run.shard`."""
        self.exchanges = 0
        """The number of exchanges so far; equal in all processes, whether or not `step` follows."""
        self.sums = False
        """Whether gradients are added undivided: a batch has weight 1, a missing one 0."""
        self.compare: Callable[[int], None] | None = None
        """Compares the fingerprint of an epoch's first batches with other workers, if exchanges do not include it."""
        self._dealt: dict[int, Share] = {}
        """By open epoch: the share of its latest batch."""
        self._fingerprints: dict[int, int] = {}
        """By epoch: a fingerprint of the batches of all workers since the last exchange."""
        self._compared: set[int] = set()
        self._batch = False
        self._streams: list[list[torch.Tensor]] = []
        self._seed = seed

    @property
    def rank(self) -> int:
        return self.ranks[self.pass_index]

    @property
    def last(self) -> bool:
        return self.pass_index == self.count - 1

    def add_up(self) -> None:
        """From now on gradients are added undivided."""
        self.sums, self.share, self.even = True, 1.0, 1.0

    def deal(self, share: Share, samples: int, joined: Share = 0.0, number: int = 0, fingerprint: int = 0) -> None:
        """Deal a batch of an epoch, given by its number, to the present worker."""
        self.before_batch()
        self.dealt = True
        self._taken += 1
        if self.sums:
            assert not callable(share)
            share = 1.0 if share > 0 else 0.0
        self._dealt[number] = share
        if not callable(share):
            self.share = share
        elif self.sample_counts is not None:  # weighs it at the next merge
            self.share = self.even if samples else 0.0
        if self.pass_index == 0:
            self._fingerprints[number] = (self._fingerprints.get(number, 0) * 31 + fingerprint) % 2**62
        self.samples += samples
        if self.sample_counts is not None:
            self.sample_counts.deal(self.pass_index, share, joined)
        self._batch = True

    def passed(self, number: int) -> None:
        """An epoch is over: its last batch is not part of later steps."""
        self._dealt.pop(number, None)
        self._fingerprints.pop(number, None)
        self._compared.discard(number)
        self.share = next((each for each in self._dealt.values() if not callable(each)), self.even)

    @property
    def fingerprint(self) -> int:
        """A fingerprint of the batches of all workers since the last exchange."""
        return sum(self._fingerprints.values()) % 2**62

    def _weigh(self) -> None:
        """Determine the share of the step. If several loaders have dealt a batch, they must agree on it."""
        counted = {each() for each in self._dealt.values() if callable(each)}
        shares = counted or {each for each in self._dealt.values() if not callable(each)}
        if len(shares) > 1:
            raise LoopError(
                "the loaders of this step give their batches different shares of it; give each the same number of "
                "batches of equal size (drop_last=True), or pass samples=... to run.shard() for the one that counts"
            )
        self.share = shares.pop() if shares else self.share

    def _compare(self) -> None:
        """At the first backward of an epoch: raise LoopError if the workers' loaders differ."""
        new = self._fingerprints.keys() - self._compared
        if self.compare is not None and new:
            self.compare(sum(self._fingerprints[number] for number in new) % 2**62)
        self._compared |= new

    def accumulated(self) -> None:
        """The present batch is one of several in its step, which have a single share."""
        self.within = True
        if any(callable(each) for each in self._dealt.values()):
            raise LoopError(
                "run.shard(samples=...) weighs each batch of a step by itself, but accumulate() adds gradients before "
                'that; use run.distribute(..., reduction="sum"), and divide the loss by the samples of the whole step'
            )
        if any(each != self.even for each in (self.share, *self._dealt.values())):
            raise LoopError(
                "a batch differs in size from its peers, and is one of several in a step with accumulate(); build the "
                "loader with drop_last=True, and give every worker as many batches"
            )

    def begin_backward(self) -> None:
        if self.count > 1 and not self._batch:
            raise LoopError(
                "backward ran without a new batch from run.shard(), and this process carries several workers; "
                "take every batch from run.shard(), and put all but its last backward into `with run.accumulate():`"
            )
        if self.count > 1 and not self.step_called:
            raise LoopError(
                "a worker's backward was not followed by step(), and this process carries several workers; put all but "
                "the last backward before a step into `with run.accumulate():`"
            )
        self.step_called = False
        if self.pass_index == 0 and self.count > 1:
            self.complete = False
        self._compare()
        if self.sample_counts is None:
            self._weigh()

    def next(self) -> None:
        """The present worker's pass is over."""
        if self.pass_index == 0:
            self._taken_first = self._taken
        elif self._taken != self._taken_first:
            raise LoopError(
                f"a worker took {self._taken} batches for a step, another one {self._taken_first}, and this process "
                "carries both; let each worker take the same number of batches for a step, all in a row"
            )
        self._taken = 0
        self._batch = self.within = False
        self.complete = self.last
        if self.last:
            self._fingerprints.clear()
        if self.count > 1:
            self._streams[self.pass_index] = rng_state()
            self.pass_index = (self.pass_index + 1) % self.count
            set_rng_state(self._streams[self.pass_index])

    def exchanged(self) -> None:
        self.unstepped = True
        self.exchanges += 1

    def stepped(self) -> None:
        self.step += 1
        self.unstepped = False
        self.samples = 0

    def part_streams(self) -> None:
        """From now on every logical worker has its own random stream, in whichever process it runs."""
        for rank in reversed(self.ranks):
            torch.manual_seed(stream_seed(self._seed, rank))
            self._streams.insert(0, rng_state())

    @contextmanager
    def stream_of(self, pass_index: int) -> Iterator[None]:
        """Use the random stream of another pass's worker, which draws before its pass begins."""
        if pass_index == self.pass_index or not self._streams:
            yield
            return
        mine = rng_state()
        set_rng_state(self._streams[pass_index])
        try:
            yield
        finally:
            self._streams[pass_index] = rng_state()
            set_rng_state(mine)

    def streams(self) -> list[list[torch.Tensor]]:
        """The random stream of each logical worker of this process, between steps."""
        return [rng_state(), *self._streams[1:]]

    def set_streams(self, streams: list[list[torch.Tensor] | None]) -> None:
        """Continue with these streams; None: unchanged."""
        self._streams = [new or old for new, old in zip(streams, self.streams(), strict=True)]
        set_rng_state(self._streams[0])
