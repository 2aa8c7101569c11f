"""The position of a run in its data, in batches that steps have used; batches that loaders prefetched do not count.

An *epoch* is one iteration of `run.shard`. A resumed loop starts from its beginning: completed epochs yield nothing,
and random numbers continue as after the last of them; an open epoch continues after its last step. Iterations without a
step are repeated. A loop over `run.epochs` skips the epochs of completed bodies, with the bodies' code.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from weft.errors import LoopError
from weft.runtime.loop.epochs import EpochLoop
from weft.runtime.loop.rng import process_rng_state, set_process_rng_state


@dataclass
class Epoch:
    """One iteration over a loader."""

    number: int
    began: int
    """Optimizer steps taken before it; together with `beside` it seeds the random order."""
    consumed: int = 0
    """Batches that steps have used, over all workers, without those of `out`."""
    over: bool = False
    stepped: bool = False
    """Whether steps were taken in it."""
    draws: list[Any] = field(default_factory=list)
    """The states of random numbers at its start, for loaders that can only be read from the start."""
    beside: int = 0
    """The number of other open epochs that began at the same step, as with two zipped loaders."""
    again: bool = False
    """Whether it began in an earlier attempt."""
    out: int = 0
    """Batches that were dealt after `dealt_at` steps; the next step uses them."""
    dealt_at: int = -1
    repeats: bool = False
    """Whether it follows another epoch in one iteration of the loop, as under `run.shard(epochs=2)`."""
    loader: int = -1
    """The number of its DataLoader, in the order in which the loop first used them."""

    def deal(self, batches: int, step: int) -> None:
        """Deal batches for the step after this one."""
        self.consumed, self.out = self.used(step), batches + (self.out if step == self.dealt_at else 0)
        self.dealt_at = step

    def used(self, step: int) -> int:
        """The number of batches that are used after this many steps."""
        return self.consumed + (self.out if step > self.dealt_at else 0)


class DataPosition:
    """The epochs of a run, in the order in which the loop began them."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []
        self.generators: Sequence[torch.Generator] = ()
        """Generators that the run keeps besides torch's own."""
        self._ended: list[Any] = []
        """The states of random numbers at the end of the latest epoch with steps."""
        self._left: list[Epoch] = []  # epochs of an earlier attempt that the loop has not reached again
        self.resized = False
        """Whether that attempt had another number of workers."""
        self.loops: list[EpochLoop] = []
        """The loops over `run.epochs`, in the order in which they began."""
        self._loops_left: list[EpochLoop] = []
        self._skipped: list[Epoch] = []
        """Epochs of skipped bodies, until their loader's sampler has counted them."""
        self._loaders: dict[int, weakref.ref[Any]] = {}

    # --- loops over run.epochs ----------------------------------------------------------------------------------------

    def begin_loop(self) -> EpochLoop:
        """The next loop over `run.epochs`; epochs of bodies that an earlier attempt completed are skipped."""
        if any(loop.inside and not (loop.over or loop.cut) for loop in self.loops):
            raise LoopError("run.epochs() inside another run.epochs(); use range() for the inner loop")
        loop = self._loops_left.pop(0) if self._loops_left else EpochLoop(first=self.begun, body=self.begun)
        self.loops.append(loop)
        skipped = self._left[: max(0, loop.body - self.begun)]
        if skipped:
            del self._left[: len(skipped)]
            self.epochs += skipped
            self._skipped += [epoch for epoch in skipped if epoch.stepped]
            self.skipped()
        return loop

    @property
    def begun(self) -> int:
        """The number of epochs that have begun or were skipped."""
        return len(self.epochs)

    def is_open(self, since: int) -> bool:
        """Whether an epoch from this number on is not over."""
        return any(not epoch.over for epoch in self.epochs[since:])

    @property
    def finished(self) -> bool:
        """Whether the loop has no more data to come, as far as loops over `run.epochs` tell."""
        return bool(self.loops) and not self.is_open(0) and (self.loops[-1].over or self.loops[-1].last)

    def repeats_code(self) -> bool:
        """Whether a resumed loop will run code beside completed epochs again."""
        ends = [*(not later.repeats for later in self._left[1:]), True]
        return any(
            epoch.over and epoch.stepped and end and not any(loop.covers(number) for loop in self._loops_left)
            for number, (epoch, end) in enumerate(zip(self._left, ends, strict=False))
        )

    def uncounted(self, loader: Iterable[Any]) -> list[Epoch]:
        """Epochs over this loader in skipped bodies, which its sampler has not counted; each is returned once."""
        number = self._number(loader)
        found = [epoch for epoch in self._skipped if epoch.loader == number >= 0]
        self._skipped = [epoch for epoch in self._skipped if epoch not in found]
        return found

    def _number(self, loader: Iterable[Any]) -> int:
        """The number of a DataLoader; -1 for another iterable, whose state no sampler holds."""
        if not isinstance(loader, DataLoader):
            return -1
        number = next((each for each, known in self._loaders.items() if known() is loader), None)
        if number is None:
            skipped, bodies = [epoch.loader for epoch in self._skipped], sum(loop.completed for loop in self.loops)
            used_in_all = [each for each in skipped if skipped.count(each) == bodies]
            unused = max([-1, *(epoch.loader for epoch in (*self.epochs, *self._left))]) + 1
            number = self._left[0].loader if self._left else min(used_in_all, default=unused)
            self._loaders[number] = weakref.ref(loader)
        return number

    # --- epochs -------------------------------------------------------------------------------------------------------

    def begin(self, step: int, loader: Iterable[Any], *, repeats: bool = False) -> Epoch:
        """The next epoch; already over if an earlier attempt completed it."""
        number = self._number(loader)
        if self._left:
            epoch = self._left.pop(0)
            self.epochs.append(epoch)
            if not epoch.over and not any(not later.over for later in self._left):
                self.epochs += self._left  # iterations inside this one, already complete
                self._left = []
            elif epoch.over and not epoch.stepped:  # an evaluation: repeated, and not counted
                return Epoch(number=-1, began=epoch.began, beside=epoch.beside)
            return epoch
        beside = sum(1 for each in self.epochs if not each.over and each.began == step)
        draws = [*self._states(), *(generator.get_state() for generator in _generators(loader))]
        epoch = Epoch(number=len(self.epochs), began=step, draws=draws, beside=beside, repeats=repeats, loader=number)
        self.epochs.append(epoch)
        return epoch

    @contextmanager
    def entering(self, epoch: Epoch, loader: Iterable[Any]) -> Iterator[None]:
        """Use the random numbers of the epoch's start, if it began in an earlier attempt."""
        if not epoch.again or not epoch.draws:
            yield
            return
        now, count = self._states(), len(self._states())
        self._set_states(epoch.draws[:count])
        for generator, state in zip(_generators(loader), epoch.draws[count:], strict=True):
            generator.set_state(state)
        yield
        self._set_states(now)

    def skipped(self) -> None:
        """The loop has skipped a completed epoch; after the last of them, random numbers continue as they did then."""
        if self._ended and not any(later.over and later.stepped for later in self._left):
            self._set_states(self._ended)

    def end(self, epoch: Epoch, step: int) -> None:
        epoch.over, epoch.stepped, epoch.draws = True, step > epoch.began, []
        if epoch.stepped:
            self._ended = self._states()

    def _states(self) -> list[Any]:
        return [process_rng_state(), torch.get_rng_state(), *(each.get_state() for each in self.generators)]

    def _set_states(self, states: list[Any]) -> None:
        set_process_rng_state(states[0])
        torch.set_rng_state(states[1])
        for generator, state in zip(self.generators, states[2:], strict=True):
            generator.set_state(state)

    def within(self, step: int) -> bool:
        """Whether the loop holds batches that no step has used yet."""
        return any(epoch.dealt_at == step and not epoch.over for epoch in self.epochs)

    def state(self, step: int) -> list[Any]:
        """The position after this many steps, without random numbers, which are each worker's own."""
        return [
            [e.began, e.used(step), e.over, e.stepped, e.beside, e.repeats, e.loader]
            for e in [*self.epochs, *self._left]
        ]

    def loop_states(self) -> list[list[Any]]:
        """The positions of the loops over `run.epochs`."""
        return [list(astuple(loop)) for loop in [*self.loops, *self._loops_left]]

    def draws(self) -> dict[int, list[Any]]:
        """The states of random numbers by open epoch; at -1 those at the end of the latest epoch with steps."""
        return {-1: self._ended} | {epoch.number: epoch.draws for epoch in self.epochs if not epoch.over}

    def load(self, state: list[Any], draws: dict[int, list[Any]], loops: list[Any]) -> None:
        self.epochs, self._left, self._ended = [], [], draws.get(-1, [])
        for number, saved in enumerate(state):
            began, consumed, over, stepped, beside, repeats, loader = _completed(saved)
            epoch = Epoch(number, began, consumed, over, stepped, draws.get(number, []), beside, again=True)
            epoch.repeats, epoch.loader = repeats, loader
            self._left.append(epoch)
        self.loops, self._loops_left = [], [EpochLoop(*loop) for loop in loops]


def _generators(loader: Any) -> list[torch.Generator]:
    """A loader's own generators, including those of its samplers."""
    batches = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))


def _completed(saved: list[Any]) -> list[Any]:
    """An epoch's state; earlier checkpoints do not hold its last values."""
    return [*saved, *[0, False, -1][len(saved) - 4 :]]
