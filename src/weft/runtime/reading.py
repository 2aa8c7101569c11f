"""How far a run has read its data, as consumed by steps: what loaders have fetched ahead does not count.

An *epoch* is one pass of `run.shard`. Where a run goes on, the loop starts from its beginning again: epochs that were
through give nothing, the one that was open goes on behind its last step. Passes without a step (evaluations) are made
again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch


@dataclass
class Epoch:
    """One pass over a loader."""

    number: int
    began: int
    """Optimizer steps taken before it; names its random order."""
    consumed: int = 0
    """Batches that steps have used, over all workers."""
    over: bool = False
    stepped: bool = False
    """Whether steps were taken in it."""
    draws: list[Any] = field(default_factory=list)
    """The random numbers' states at its beginning: a loader that cannot be entered in the middle is read again."""


class Reading:
    """The epochs of a run, in the order in which the loop began them."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []
        self._left: list[Epoch] = []  # of an earlier part of the run, and not yet met again
        self.resized = False
        """Whether that part had another number of workers."""

    def begin(self, step: int, loader: Iterable[Any]) -> Epoch | None:
        """The next epoch; None where an earlier part of the run has been through it."""
        while self._left:
            epoch = self._left.pop(0)
            self.epochs.append(epoch)
            if not epoch.over:
                if not any(not later.over for later in self._left):  # passes inside of this one, already made
                    self.epochs += self._left
                    self._left = []
                _set_states(epoch.draws, loader)
                return epoch
            if epoch.stepped:
                return None
            return Epoch(number=-1, began=epoch.began)  # an evaluation: again, and not counted
        epoch = Epoch(number=len(self.epochs), began=step, draws=_states(loader))
        self.epochs.append(epoch)
        return epoch

    def end(self, epoch: Epoch, step: int) -> None:
        epoch.over, epoch.stepped, epoch.draws = True, step > epoch.began, []

    def state(self) -> list[Any]:
        """Without the random numbers, which are each worker's own."""
        return [[e.began, e.consumed, e.over, e.stepped] for e in [*self.epochs, *self._left]]

    def draws(self) -> dict[int, list[Any]]:
        return {epoch.number: epoch.draws for epoch in self.epochs if not epoch.over}

    def load(self, state: list[Any], draws: dict[int, list[Any]]) -> None:
        self.epochs, self._left = [], []
        for number, (began, consumed, over, stepped) in enumerate(state):
            self._left.append(Epoch(number, began, consumed, over, stepped, draws.get(number, [])))


def process_draws() -> list[Any]:
    """Python's and numpy's global random numbers: one stream for each process, whomever it carries."""
    version, inner, gauss = random.getstate()
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    return [
        (version, torch.tensor(inner), gauss),
        (kind, torch.from_numpy(numpy.asarray(keys, dtype=numpy.int64)), *rest),
    ]


def set_process_draws(states: list[Any]) -> None:
    version, inner, gauss = states[0]
    random.setstate((version, tuple(inner.tolist()), gauss))
    kind, keys, *rest = states[1]
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))


def _states(loader: Iterable[Any]) -> list[Any]:
    own = [generator.get_state() for generator in _generators(loader)]
    return [process_draws(), torch.get_rng_state(), *own]


def _set_states(states: list[Any], loader: Iterable[Any]) -> None:
    if not states:
        return
    set_process_draws(states[0])
    torch.set_rng_state(states[1])
    for generator, state in zip(_generators(loader), states[2:], strict=True):
        generator.set_state(state)


def _generators(loader: Any) -> list[torch.Generator]:
    """A loader's own random numbers, wherever it keeps them."""
    batches = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))
