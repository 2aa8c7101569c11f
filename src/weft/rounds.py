"""The rounds of a server: which contributions have arrived, when they become an update, and which pulls are allowed.

It depends on the synchrony only, not on a clock, a thread or a socket, so tests run it in virtual time. A round is the
set of contributions of one update. Contributions are weighted by their workers' shares of the batch. A full round is
summed in the tree of the logical ranks, bit-identical to `direct`; a partial one is divided by the sum of its shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from weft.synchrony import Synchrony, View
from weft.topology.direct import add_tree


class Update(Protocol):
    """Updates the model with gradients in the order of its tensors."""

    def __call__(self, grads: Sequence[Tensor | None]) -> None: ...


@dataclass(frozen=True)
class Contribution:
    """One worker's gradients of one step, each multiplied by `share`; None for a tensor without a gradient."""

    worker: int
    share: float
    grads: Sequence[Tensor | None]
    read: int | None = None
    """The version that they were computed with; None: the version that the worker read last."""


@dataclass
class Rounds:
    """The tensors of `model`, which `update` changes in place, and the present round."""

    synchrony: Synchrony
    model: Sequence[Tensor]
    workers: int
    update: Update
    updated: Callable[[int, int], None] = lambda worker, staleness: None
    """Called for each contribution that becomes part of an update, with its staleness in updates."""
    version: int = 0
    gone: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.clocks = [0] * self.workers
        self.reads = [-1] * self.workers
        self.round: list[Contribution] = []
        self._read: dict[int, dict[int, list[Tensor]]] = {}
        """By worker: the versions that its next gradients may be computed with, if the synchrony looks back."""
        self._moved: list[tuple[int, int, float]] = []

    @property
    def view(self) -> View:
        """The progress of all workers, for the synchrony."""
        unseen = [0.0] * self.workers
        for worker, _, size in self._moved:
            unseen[worker] += size
        return View(
            clocks=tuple(self.clocks),
            gone=frozenset(self.gone),
            version=self.version,
            reads=tuple(self.reads),
            unseen=tuple(unseen),
        )

    def may_start(self, worker: int) -> bool:
        """Whether a worker may read the model and start its next step."""
        return self.reads[worker] < 0 or self.synchrony.may_start(worker, self.view)

    def read(self, worker: int) -> int:
        """A worker reads the present model; returns its version."""
        self.reads[worker] = self.version
        if self.synchrony.looks_back:
            older = self._read.get(worker, {}) if self.synchrony.eager else {}  # a prefetched version may be unused yet
            self._read[worker] = older | {self.version: [tensor.detach().clone() for tensor in self.model]}
        seen = min((self.reads[w] for w in range(self.workers) if w not in self.gone), default=self.version)
        self._moved = [each for each in self._moved if each[1] > seen]
        return self.version

    def contribute(self, mine: Contribution) -> bool:
        """A worker has finished a step; returns whether its gradients were accepted."""
        worker = mine.worker
        version = self.reads[worker] if mine.read is None else mine.read
        was = self._was(worker, version)
        self.clocks[worker] += 1
        staleness = self.version - version
        fitted: list[Tensor | None] = []
        for grad, now, read in zip(mine.grads, self.model, was, strict=True):
            fitted.append(None if grad is None else self._fitted(grad, now, read, staleness, mine.share))
            if grad is not None and fitted[-1] is None:
                return False
        self.round.append(Contribution(worker, mine.share, fitted))
        self.updated(worker, staleness)
        self.close()
        return True

    def _fitted(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int, share: float) -> Tensor | None:
        """Correct a gradient for the present model. A correction that looks back need not be linear, so it gets the
        gradient without the worker's share."""
        if not self.synchrony.looks_back or not share:
            return self.synchrony.correct(grad, now, read, staleness)
        own = self.synchrony.correct(grad / share, now, read, staleness)
        return None if own is None else own * share

    def _was(self, worker: int, version: int) -> Sequence[Tensor]:
        """The model as a worker read it. Raises ValueError if it cannot have read this version."""
        kept = self._read.get(worker, {})
        if version > self.version or (self.synchrony.looks_back and version not in kept):
            raise ValueError(f"gradients of version {version}, which worker {worker} has not read")
        for older in [each for each in kept if each < version]:
            del kept[older]
        return kept.get(version, self.model)

    def close(self) -> None:
        """Update the model with the present round, if it has reached its quorum."""
        if not self.round or len(self.round) < self.synchrony.quorum(self.view):
            return
        rows, self.round = self.round, []
        before = [tensor.detach().clone() for tensor in self.model] if self.synchrony.bounds_values else []
        self.update(mean(rows, self.workers))
        self.version += 1
        moved = max(
            (float((now.detach() - was).abs().max()) for now, was in zip(self.model, before, strict=False)), default=0.0
        )
        if self.synchrony.bounds_values:
            self._moved += [(row.worker, self.version, moved) for row in rows]

    def leave(self, worker: int) -> None:
        """Remove a worker, so that rounds no longer wait for it."""
        self.gone.add(worker)
        self.close()

    def join(self, worker: int) -> None:
        """Add a new or returning worker, at the clock of the slowest."""
        self.clocks[worker] = max(self.clocks[worker], self.view.slowest)
        self.gone.discard(worker)


def mean(rows: Sequence[Contribution], workers: int) -> list[Tensor | None]:
    """The mean of weighted contributions; their sum, if all workers contributed.

    A missing gradient counts as zero; the result is None if no worker has one.
    """
    ordered = sorted(rows, key=lambda row: row.worker)
    whole = [row.worker for row in ordered] == list(range(workers))
    total = 1.0 if whole else sum(row.share for row in ordered)
    sums: list[Tensor | None] = []
    for each in zip(*(row.grads for row in ordered), strict=True):
        like = next((grad for grad in each if grad is not None), None)
        if like is None:
            sums.append(None)
            continue
        leaves = {(i, i + 1): torch.zeros_like(like) if grad is None else grad for i, grad in enumerate(each)}
        added = add_tree(leaves, 0, len(each))
        sums.append(added if whole else torch.zeros_like(added) if total == 0 else added / total)
    return sums
