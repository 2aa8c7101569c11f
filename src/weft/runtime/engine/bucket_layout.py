"""Which parameters share a bucket, in which order buckets leave, and the memory of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from weft.ops import Spec
from weft.profile import Measured
from weft.runtime.engine.buckets import BucketMemory
from weft.runtime.engine.calibration import Calibration
from weft.runtime.engine.engine import Engine
from weft.runtime.loop.logical_workers import Passes


@dataclass(frozen=True)
class SavedLayout:
    """A layout as a checkpoint keeps it: the order in which backward finishes parameters, and the calibration."""

    order: Sequence[str]
    measured: Measured | None


class BucketLayout:
    """The buckets of a model's trainable parameters; one set of memory for each logical worker of this process."""

    def __init__(self, engine: Engine, params: Sequence[Tensor], names: Sequence[str], passes: Passes) -> None:
        self.engine, self.params, self.names, self.passes = engine, params, names, passes
        self.order: list[int] = []
        """Parameters in the order in which backward finishes them, as the present layout assumes."""
        self.measured: Measured | None = None
        self.calibration: Calibration | None = None
        """Measures the first steps, where the schedule learns from them."""
        self.fixed = False
        """Whether the order comes from an earlier attempt, and the first step does not change it."""

    def start(self, saved: SavedLayout | None, folder: Path | None) -> None:
        """Lay buckets out before the first step: the last parameter first, or in the order of an earlier attempt."""
        engine, names, measured = self.engine, list(reversed(self.names)), None
        if engine.schedule.learns:
            self.calibration = Calibration(engine.transport, engine.clock, self.names, folder)
        if saved is not None:
            names, measured = list(saved.order), saved.measured if self.calibration else None
        if self.calibration and measured is None and (measured := self.calibration.recall()):
            names = list(measured.ready_s)
        self.fixed = saved is not None or measured is not None
        if measured is not None:
            self.calibration = None
        index = {name: i for i, name in enumerate(self.names)}
        self._lay_out([index[name] for name in names], measured)

    def _lay_out(self, order: Sequence[int], measured: Measured | None) -> None:
        self.measured, self.order = measured, list(order)
        specs = [Spec(self.names[i], tuple(self.params[i].shape), self.params[i].dtype) for i in order]
        timetable = self.engine.lay_out(specs, measured)
        index = {name: i for i, name in enumerate(self.names)}
        self.members = [[index[spec.name] for spec in group] for group in timetable.buckets]
        self.bucket_of = {i: b for b, members in enumerate(self.members) for i in members}
        self.memory = [
            BucketMemory(timetable, self.members, self.params, leads=number == self.passes.count - 1)
            for number in range(self.passes.count)
        ]

    def step_ended(self, finished: Sequence[int]) -> None:
        """The means of a step have arrived: follow the order of the first step, and the calibration once it is done.

        `finished` are the parameters in the order in which backward finished them.
        """
        if self.passes.step == 0 and len(self.members) > 1 and not self.fixed:
            order = self.engine.transport.tell(list(dict.fromkeys(finished)))[0]
            if order != self.order:
                self._move(order, None)
        if self.calibration and self.calibration.step_ended():
            measured = self.calibration.learn(self.order, self.engine.device)
            self.calibration = None
            self._move(self.order, measured)

    def _move(self, order: Sequence[int], measured: Measured | None) -> None:
        """Lay buckets out anew, between steps, and keep the gradients in them."""
        self._lay_out(order, measured)
        for i, param in enumerate(self.params):
            if param.grad is not None:
                self.memory[-1].put(i, param.grad, 1.0)
        self.fill()

    @property
    def current(self) -> BucketMemory:
        """The memory of the logical worker whose pass it is."""
        return self.memory[self.passes.pass_index]

    def fill(self) -> None:
        """Move all waiting gradients into their buckets."""
        for bucket in range(len(self.members)):
            self.current.fill(bucket)

    def release(self) -> None:
        """The gradients were cleared: let go of memory that autograd allocated."""
        for memory in self.memory:
            memory.release()

    def saved(self) -> SavedLayout:
        """The layout for a checkpoint."""
        return SavedLayout([self.names[i] for i in self.order], self.measured)
