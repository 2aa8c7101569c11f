"""Workers exchange gradient buckets beside backward, and every worker's optimizer steps with the mean.

A hook runs when autograd has finished a parameter. It hands the gradient to its bucket. A full bucket's gradients are
multiplied by the worker's share of the batch, in one pass into the bucket's memory, and the bucket goes to the engine.
On a GPU the engine makes that pass, on its own stream. A parameter with a bucket to itself stays where autograd put it.
When backward ends, `.grad` is a view of the bucket and holds the mean: code between `backward` and `step` sees reduced
gradients.

A schedule may defer updates: backward then returns while means are still being exchanged (`engine/deferred_step`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.compression import State
from weft.runtime.checks.step_status import StepStatus
from weft.runtime.engine.backward_pass import BackwardPass
from weft.runtime.engine.bucket_layout import BucketLayout, SavedLayout
from weft.runtime.engine.deferred_step import Deferred
from weft.runtime.engine.engine import Engine
from weft.runtime.engine.linear_factors import Factors
from weft.runtime.loop import refusals
from weft.runtime.loop.between_passes import BetweenPasses
from weft.runtime.loop.buffers import Buffers
from weft.runtime.loop.gradient_checks import GradientChecks
from weft.runtime.loop.late_changes import LateChanges, compiled
from weft.runtime.loop.momentum import check_claims, claimed_momentum
from weft.runtime.loop.partial_step import PartialStep, has_scaler, may_defer
from weft.runtime.loop.step_hooks import has_step_hooks
from weft.runtime.modes import Mode, RunContext
from weft.strategy import wrapped

log = logging.getLogger(__name__)


@final
class AllReduce(Mode):
    """Hooks on a model's parameters, and the exchange of their gradients."""

    def __init__(
        self, ctx: RunContext, model: nn.Module, optimizer: Optimizer, followers: Sequence[Any], *, unused: bool
    ) -> None:
        super().__init__(ctx, model, optimizer, followers, unused=unused)
        strategy, passes = ctx.strategy, ctx.passes
        named = {p: name.removeprefix("_orig_mod.") for name, p in model.named_parameters()}
        self.params = [p for p in named if p.requires_grad]
        self.names = [named[p] for p in self.params]
        frozen = [(name, p) for p, name in named.items() if not p.requires_grad]
        self.passes, self.phases = passes, ctx.phases
        momentum = claimed_momentum(strategy, optimizer)
        self._claims_momentum = momentum is not None
        self.status = StepStatus(self.names, self.params, lossless=strategy.compression.lossless and not passes.sums)
        self.engine = Engine(
            strategy,
            ctx.transport,
            ctx.device,
            ctx.seed,
            clock=ctx.clock,
            status=self.status,
            momentum=momentum or 0.0,
        )
        ctx.phases.observe(self.engine, ctx.transport)
        self.buckets = BucketLayout(self.engine, self.params, self.names, passes)
        self._checks = GradientChecks(self.buckets, frozen)
        self.unused: bool | None = unused or None  # None: the first step decides
        self.deferred = Deferred(self.engine, ctx.phases)
        self._defers = may_defer(strategy, model, optimizer)
        self._partial_step = PartialStep(optimizer)
        self._late_changes = LateChanges(model, optimizer, followers, hooked=self.params)
        self._between_passes = BetweenPasses(model, optimizer, self.params) if passes.count > 1 else None
        needs_factors = any(layer.factors for layer in wrapped(strategy.compression))
        factors = Factors(model, self.params) if needs_factors else None
        self._backward = BackwardPass(self.buckets, factors)
        self._in_backward = False
        self._reduced = False
        """Whether means have arrived since `zero_grad`."""
        self._accumulated = False
        """Whether gradients from `accumulate()` wait for an exchange."""
        if hasattr(model, "_orig_mod"):
            log.warning("a compiled model hands over its gradients all at once: right, but without overlap")

    def attach(self, layout: SavedLayout | None) -> None:
        self.buffers = Buffers(self.model, self.passes.workers)  # as a checkpoint has restored them
        self.buckets.start(layout, self.ctx.folder)
        if self._between_passes is not None:
            self.passes.before_batch = self._between_passes.next_pass
        for index, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(lambda p, index=index: self._arrived(index, p))

    # --- step -------------------------------------------------------------------------------------------------------

    @property
    def _is_between_passes(self) -> bool:
        return self._between_passes is not None and self._between_passes.between

    def check_step(self) -> None:
        if self._accumulated:
            raise refusals.only_accumulated()
        self._late_changes.check_parameters()
        if not (self.passes.unstepped or self._is_between_passes):
            self.flush()
            self._checks.not_set_by_hand(reduced=self._reduced)

    def pass_stepped(self, update: Callable[[], Any]) -> None:
        """Its gradients count in the last pass."""
        if self._between_passes is not None:
            self._between_passes.hide()

    def step(self, update: Callable[[], Any]) -> Any:
        if not has_scaler(self.optimizer):
            self._check_finite()
        if self._claims_momentum:
            check_claims(self.optimizer)
        self.phases.optimizer_began()
        if self.deferred.stepping or has_step_hooks(self.optimizer):
            self.flush()  # a second step, or one that a hook observes as a whole
        if self.deferred.under_way:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler reads it
            self.deferred.step(self._partial_step.freeze())
            return None
        with self._late_changes.stepping():
            return update()

    def _check_finite(self) -> None:
        self.status.check()
        if not self.deferred.under_way:
            memory = self.buckets.memory[-1]
            self.status.shield([memory.contents(bucket) for bucket in range(len(self.buckets.members))])

    def zero_grad(self, clear: Callable[[], None], *, set_to_none: bool) -> None:
        if self._is_between_passes:
            return
        self.passes.unstepped = False
        if not (self.deferred.stepping and set_to_none):
            self.flush()
        self._accumulated = self._reduced = False
        if self.deferred.stepping:
            self.deferred.clear()
        elif self.passes.pass_index == 0 and not self._in_backward:
            self.buckets.release()
        if not self.deferred.clearing:
            clear()

    # --- backward ---------------------------------------------------------------------------------------------------

    def _arrived(self, index: int, param: Tensor) -> None:
        """Autograd has finished a parameter."""
        if self._between_passes is not None and self._between_passes.between:
            self._between_passes.next_pass()  # a worker without a batch, which `passes` refuses
        else:
            self._checks.not_pending(index, param)
        grad = param.grad
        assert grad is not None
        self._checks.can_be_exchanged(index, grad)
        if not self._in_backward:
            self.flush()
            if not self._accumulated:
                self._checks.cleared_before_pass(index)
        if self.passes.accumulating:
            self.passes.accumulated()
            self._accumulated = True
            return
        if not self._in_backward:
            self._begin()
        if self.buckets.calibration:
            self.buckets.calibration.arrived(index)
        self._backward.put(index, grad)

    def _begin(self) -> None:
        """The first gradient of a backward. The exchange starts with the last logical worker's pass."""
        self.passes.begin_backward()
        if self._accumulated:
            self.passes.accumulated()
        self._late_changes.check_parameters()
        self._late_changes.check_hooks()
        self._late_changes.in_backward = self._in_backward = True
        self._backward.begin()
        if self.passes.last:
            self.engine.begin(self.buckets.memory, self.passes.step)
            self.status.batches = self.passes.fingerprint
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        """The end of a backward; in the last pass of a step, wait for the means or defer them."""
        self._late_changes.in_backward = self._in_backward = False
        self._accumulated = False
        self.phases.backward_ended()
        for i in self._backward.unreached():
            self._stay(i)
        self.buffers.pass_ended(self.passes)
        if self.passes.last:
            self._exchanged()
        else:
            self.buckets.fill()
        self.phases.exchange_ended()
        if self._between_passes is not None and not self.passes.last:
            self._between_passes.pass_ended()
        self.passes.next()

    def _stay(self, index: int) -> None:
        """A parameter without a gradient in this backward keeps an earlier one, or adds nothing."""
        grad = self.params[index].grad
        if grad is not None:
            self._backward.put(index, grad)
        elif self.unused is False:
            raise refusals.unused_parameter(self.names[index], self.passes.step)
        else:
            self._backward.zero(index)

    def _exchanged(self) -> None:
        """All gradients of a step are with the engine."""
        defer = self._defers and self.unused is False and self.buckets.calibration is None and not compiled()
        if not defer:
            self.engine.finish()
        self.engine.spread(self.buffers.tensors)
        self.buffers.settled()
        self._checks.not_unfrozen()
        if defer:
            self.deferred.begin([[self.params[i] for i in members] for members in self.buckets.members])
        else:
            self._set_gradients()
            self.buckets.step_ended(self._backward.finished)
            self.status.mark()
        self._backward.finished = []
        self.passes.used = set()
        self.passes.exchanged()
        self._reduced = True

    def _set_gradients(self) -> None:
        """`.grad` as one process would have it: the mean, or None for a parameter that no worker used."""
        if self.unused is False:
            return
        rows = self.engine.transport.tell([int(i in self.passes.used) for i in range(len(self.params))])
        used = [any(flags) for flags in zip(*rows, strict=True)]
        if self.unused is None:
            self.unused = not all(used)
        for i, param in enumerate(self.params):
            param.grad = self.buckets.memory[-1].view(i) if used[i] else None

    # --- around a step ----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        cleared = self.deferred.clearing
        self.deferred.flush()
        if cleared:
            self.buckets.release()

    def settle(self) -> None:
        self.flush()
        if self.status.has_unread:
            self.status.begin(self.passes.step)
            self.status.judge(self.engine.transport.tell(self.status.message()))
            self.status.check()

    def epoch_ended(self) -> None:
        self.flush()
        words = self.status.last_message(self.passes.step)
        self.status.judge(self.engine.transport.tell_later(lambda: words).heard())

    @property
    def leaving(self) -> bool:
        return self.status.leaving

    def request_termination(self) -> None:
        self.status.termination_requested = True

    @property
    def compressor_states(self) -> Sequence[State]:
        return self.engine.states

    def restore_compressors(self, states: Sequence[State]) -> None:
        self.buffers.settled()
        self.engine.restore(states)

    @property
    def layout(self) -> SavedLayout:
        return self.buckets.saved()

    def detach(self) -> None:
        self._late_changes.close()
