"""One backward of one logical worker: gradients go into their buckets, and full buckets go to the engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from weft.runtime.engine.bucket_layout import BucketLayout
from weft.runtime.engine.linear_factors import Factors
from weft.runtime.loop import refusals


class BackwardPass:
    """The gradients that the present backward has finished."""

    def __init__(self, buckets: BucketLayout, factors: Factors | None) -> None:
        self.buckets, self.engine, self.passes, self.factors = buckets, buckets.engine, buckets.passes, factors
        self.finished: list[int] = []
        """Parameters in the order in which the backwards of this step have finished them."""
        self._reached: set[int] = set()
        self._missing: list[int] = []

    def begin(self) -> None:
        """The first gradient of a backward."""
        self._reached = set()
        self._missing = [len(members) for members in self.buckets.members]

    def put(self, index: int, grad: Tensor) -> None:
        """Multiply a gradient by its share, into the bucket of the worker whose pass it is."""
        memory, share = self.buckets.current, self.passes.share
        if self.passes.unstepped and memory.holds(index, grad) and not self.engine.compression.lossless:
            raise refusals.sent_twice(self.engine.compression.name)
        if self.factors is not None and (found := self.factors.take(index, share)) is not None:
            memory.factors[index] = found
        memory.put(index, grad, share)
        if not self.passes.last:
            self.buckets.params[index].grad = None
        if share > 0.0:
            self.passes.used.add(index)
        self._count(index)

    def zero(self, index: int) -> None:
        """A parameter that adds nothing."""
        self.buckets.current.zero(index)
        self._count(index)

    def unreached(self) -> Sequence[int]:
        """Parameters that this backward has not finished."""
        return [i for i in range(len(self.buckets.params)) if i not in self._reached]

    def _count(self, index: int) -> None:
        self._reached.add(index)
        self.finished.append(index)
        bucket = self.buckets.bucket_of[index]
        self._missing[bucket] -= 1
        if self._missing[bucket] > 0:
            return
        if self.engine.stream is None:
            self.buckets.current.fill(bucket)
        if self.passes.last:
            self.engine.ready(bucket)
