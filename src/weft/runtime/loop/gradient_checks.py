"""Refuses gradients that an exchange would miss, or would count twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from weft.runtime.engine.bucket_layout import BucketLayout
from weft.runtime.engine.lazy_parameter import LazyParameter
from weft.runtime.loop import refusals


@final
class GradientChecks:
    """The checks of one model's gradients before they are exchanged; each raises LoopError."""

    def __init__(self, buckets: BucketLayout, frozen: Sequence[tuple[str, Tensor]]) -> None:
        self.buckets, self.params, self.names, self.passes = buckets, buckets.params, buckets.names, buckets.passes
        self.frozen = frozen
        """The parameters that were frozen at `distribute`, with their names."""

    def not_pending(self, index: int, param: Tensor) -> None:
        """A parameter with a gradient was used. A pending update means that the use did not wait for it."""
        if type(param) is LazyParameter:
            raise refusals.pending_update(self.names[index], self.buckets.engine.schedule.name)

    def can_be_exchanged(self, index: int, grad: Tensor) -> None:
        if grad.is_sparse:
            raise refusals.sparse_gradient(self.names[index])
        if grad.requires_grad:
            raise refusals.graph_of_gradients()

    def cleared_before_pass(self, index: int) -> None:
        """Gradients left in `.grad` when the first of several logical workers starts would count for that one alone."""
        if self.passes.count == 1 or self.passes.pass_index:
            return
        if any(p.grad is not None and p.grad.any() for i, p in enumerate(self.params) if i != index):
            raise refusals.uncleared_before_pass()

    def not_unfrozen(self) -> None:
        for name, param in self.frozen:
            if param.requires_grad and param.grad is not None:
                raise refusals.unfrozen(name)

    def not_set_by_hand(self, *, reduced: bool) -> None:
        """Before an update that no exchange has preceded. `reduced`: means have arrived since `zero_grad`."""
        for i, param in enumerate(self.params):
            grad = param.grad
            if grad is None or (reduced and self.buckets.memory[-1].holds(i, grad)):
                continue
            if grad.any():
                raise refusals.set_by_hand(self.names[i])
