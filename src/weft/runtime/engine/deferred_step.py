"""A step that is applied bucket by bucket as means arrive, while the loop continues.

Before `step`, an access to a parameter or its gradient waits for all means. After it, an access to a parameter waits
for the mean of its bucket only, and updates the bucket's parameters at that moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from weft.runtime.engine.engine import Engine
from weft.runtime.engine.lazy_parameter import LazyParameter, make_lazy, make_ready
from weft.runtime.record.phases import PhaseTimer

log = logging.getLogger(__name__)

Step = Callable[[Sequence[Tensor]], None]


class Deferred:
    """The deferred part of one step: `begin`, `step`, optionally `clear`; complete after `flush`."""

    def __init__(self, engine: Engine, phases: PhaseTimer) -> None:
        self.engine, self.phases = engine, phases
        self.under_way = self.clearing = self._said = False
        self._step: Step | None = None

    def begin(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        """Backward returns while the means of these buckets are still being exchanged."""
        self.under_way = True
        self.buckets = buckets
        self.bucket_of = {id(param): b for b, params in enumerate(buckets) for param in params}
        for params in buckets:
            for param in params:
                make_lazy(param, self._touched)

    @property
    def stepping(self) -> bool:
        return self._step is not None

    def step(self, step: Step) -> None:
        """Apply this step to each bucket's parameters once their mean has arrived and they are accessed."""
        self._step = step
        self.awaited = set(range(len(self.buckets)))

    def clear(self) -> None:
        """zero_grad() after step(): each gradient is cleared when its parameter has been updated."""
        self.clearing = True
        for params in self.buckets:
            for param in params:
                if type(param) is not LazyParameter:
                    param.grad = None

    def flush(self) -> None:
        """Wait for all buckets."""
        if not self.under_way:
            return
        if self.stepping:
            for bucket in sorted(self.awaited, reverse=True):  # in the order of forward
                self._await(bucket)
        self.engine.finish()
        for params in self.buckets:
            for param in params:
                make_ready(param)
        stepped = self.stepping
        self.under_way = self.clearing = False
        self._step = None
        if stepped:
            self.engine.status.check()
        else:
            self.engine.status.mark()

    def _touched(self, param: LazyParameter) -> None:
        if self.stepping:
            self._await(self.bucket_of[id(param)])
            return
        if not self._said:
            log.warning(
                "gradients or parameters are accessed between backward and step, so all means are awaited there: "
                "results are correct, but the next forward does not start early"
            )
            self._said = True
        self.flush()

    def _await(self, bucket: int) -> None:
        """Update a bucket's parameters, together with all others whose means have arrived: one call is cheaper.

        While the bucket's own mean is pending, the others are updated first. On a GPU an arrived mean may still have to
        be awaited in the stream, so only the requested bucket is updated.
        """
        together = self.engine.stream is None
        if together and not self.engine.arrived[bucket].is_set():
            self._update(self._arrived())
        began = self.engine.clock.stamp()
        if self.engine.wait(bucket):
            self.phases.held_up(began)
        self._update(self._arrived() if together else [bucket])

    def _arrived(self) -> list[int]:
        """Buckets whose means have arrived and whose parameters are not updated yet."""
        return [bucket for bucket in self.awaited if self.engine.arrived[bucket].is_set()]

    def _update(self, buckets: Sequence[int]) -> None:
        """Apply the step to buckets whose means have arrived."""
        if not buckets:
            return
        assert self._step is not None
        if not all(self.engine.fine[bucket] for bucket in buckets):
            self.engine.finish()
            self.engine.status.check()
        self.engine.status.shield([self.engine.memory[-1].contents(bucket) for bucket in buckets])
        self.awaited.difference_update(buckets)
        params = [param for bucket in sorted(buckets) for param in self.buckets[bucket]]
        for param in params:
            make_ready(param)
        began = self.engine.clock.stamp()
        self._step(params)
        self.phases.updated(began)
        if self.clearing:
            for param in params:
                param.grad = None
