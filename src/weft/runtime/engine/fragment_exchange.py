"""Sums the workers' differences from the anchor, one fragment of the model at a time, beside the training steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops import Spec
from weft.optimization._fragments import fragments
from weft.runtime.engine.buckets import BucketMemory
from weft.runtime.engine.engine import Engine
from weft.runtime.loop.logical_workers import Passes
from weft.runtime.record.clock import Spans


class FragmentExchange:
    """One exchange at a time: `begin`, then `arrive`. The mean of a parameter stays until its fragment begins again."""

    def __init__(self, engine: Engine, names: Sequence[str], anchors: Sequence[Tensor], passes: Passes, count: int):
        self.engine, self.anchors, self.passes = engine, anchors, passes
        specs = [Spec(name, tuple(p.shape), p.dtype) for name, p in zip(names, anchors, strict=True)]
        self.members = fragments(specs, count)
        """By fragment: the indices of its parameters."""
        at = {name: i for i, name in enumerate(names)}
        self._timetables = [engine.lay_out([specs[i] for i in inside]) for inside in self.members]
        self._buckets = [[[at[s.name] for s in group] for group in each.buckets] for each in self._timetables]
        self._memory = [
            [BucketMemory(timetable, buckets, anchors, leads=False) for _ in passes.ranks]
            for timetable, buckets in zip(self._timetables, self._buckets, strict=True)
        ]
        self._in_flight = False
        self._earlier = Spans()

    def begin(
        self,
        fragment: int,
        differences: Sequence[Sequence[Tensor]],
        shares: Sequence[float],
        *,
        step: int,
        batches: int,
    ) -> None:
        """Start to sum the differences of all workers, multiplied by their shares.

        `differences` are those of each worker of this process, in the order of the fragment's members. `batches` is a
        fingerprint of the batches dealt, which processes compare.
        """
        self.arrive()
        spans = self.engine.take_spans()
        for kept, more in zip(vars(self._earlier).values(), vars(spans).values(), strict=True):
            kept += more
        memory = self._memory[fragment]
        self.engine.follow(self._timetables[fragment])
        self.engine.begin(memory, step)
        self.engine.status.batches = batches
        self._in_flight = True
        place = {index: at for at, index in enumerate(self.members[fragment])}
        for bucket, indices in enumerate(self._buckets[fragment]):
            for own, mine, share in zip(memory, differences, shares, strict=True):
                for index in indices:
                    own.put(index, mine[place[index]], share)
                if self.engine.stream is None:
                    own.fill(bucket)
            self.engine.ready(bucket)

    def arrive(self) -> None:
        """Wait for the exchange that is in flight, if there is one."""
        if self._in_flight:
            self.engine.finish()
            self._in_flight = False

    def mean(self, fragment: int, index: int) -> Tensor:
        """The mean difference of a parameter, once its exchange has arrived."""
        return self._memory[fragment][-1].view(index)

    def load(self, fragment: int, means: Sequence[Tensor]) -> None:
        """Hold the means of an exchange that arrived before a checkpoint was saved."""
        own = self._memory[fragment][-1]
        for index, mean in zip(self.members[fragment], means, strict=True):
            own.zero(index)
            own.view(index).copy_(mean)

    def release(self, fragment: int) -> None:
        """The means have been used."""
        for own in self._memory[fragment]:
            own.release()

    @property
    def spans(self) -> Spans:
        """The spans since they were last read; an exchange may last for several steps."""
        earlier, self._earlier = self._earlier, Spans()
        now = self.engine.take_spans()
        return Spans(earlier.encode + now.encode, earlier.decode + now.decode, earlier.wire + now.wire)


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """The squared L2 norm of several tensors, in float64."""
    if not tensors:
        return 0.0
    norms = [torch.linalg.vector_norm(each.detach(), dtype=_wide(each)) for each in tensors]
    return sum(float(each.abs()) ** 2 for each in norms)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
