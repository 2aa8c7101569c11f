"""Every worker steps a copy of the model with its own optimizer, and copies are merged by a collective now and then.

No gradient is exchanged: it stays in its worker, where clipping, scaling and the step act on it. `model_merges` merges
the copies after steps for which the optimization says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.compression import State
from weft.optimization import ModelMerging
from weft.runtime.checks.finite import LocalFiniteCheck
from weft.runtime.engine.bucket_layout import SavedLayout
from weft.runtime.loop import refusals
from weft.runtime.loop.late_changes import LateChanges
from weft.runtime.loop.model_checks import check_local
from weft.runtime.loop.partial_step import has_scaler
from weft.runtime.modes import Mode, RunContext
from weft.runtime.modes.model_merges import ModelMerges


@final
class Merging(Mode):
    """Local optimizers, and merges of their models."""

    steps_each_pass = True

    def __init__(
        self, ctx: RunContext, model: nn.Module, optimizer: Optimizer, followers: Sequence[Any], *, unused: bool
    ) -> None:
        super().__init__(ctx, model, optimizer, followers, unused=unused)
        assert isinstance(ctx.strategy.optimization, ModelMerging)
        check_local(followers, ctx.passes)
        self.passes, self.phases = ctx.passes, ctx.phases
        named = {p: name.removeprefix("_orig_mod.") for name, p in model.named_parameters()}
        self.params = [p for p in named if p.requires_grad]
        names = [named[p] for p in self.params]
        self._frozen = [(name, p) for p, name in named.items() if not p.requires_grad]
        self.merges = ModelMerges(ctx, ctx.strategy.optimization, names, self.params)
        ctx.phases.observe(self.merges.exchange, ctx.transport)
        self._finite = LocalFiniteCheck(names, self.params)
        self._late_changes = LateChanges(model, optimizer, followers)
        self._in_backward = self._has_batch = False

    def attach(self, layout: SavedLayout | None) -> None:
        self.merges.start(self.model, self.optimizer)
        self.passes.before_batch = self._before_batch
        for param in self.params:
            param.register_post_accumulate_grad_hook(self._arrived)

    def _before_batch(self) -> None:
        self.merges.begin(forward=False)
        self.merges.copies.show(self.passes.pass_index)

    # --- backward and step ------------------------------------------------------------------------------------------

    def _arrived(self, param: Tensor) -> None:
        """Autograd has finished a parameter. Its gradient stays where it is."""
        self.merges.begin(forward=True)
        self._has_batch = self._has_batch or self.passes.share > 0
        if self.passes.accumulating:
            self.passes.within = True
        elif not self._in_backward:
            self.passes.begin_backward()
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        """The end of a backward, and of a worker's pass."""
        self._in_backward = False
        self.phases.backward_ended()
        last = self.passes.last
        if last and self.passes.fingerprint:
            self.merges.batches = (self.merges.batches * 31 + self.passes.fingerprint) % 2**62
        self.passes.next()
        if last:
            self.passes.exchanged()

    @property
    def accepts_closure(self) -> bool:
        return self.passes.count == 1

    def check_step(self) -> None:
        if self.merges.copies.hidden:
            raise refusals.stepped_shared_model()
        if self.passes.within:
            raise refusals.only_accumulated()
        if self.passes.count > 1 and self.passes.step_called:
            raise refusals.stepped_without_backward()
        self._late_changes.check_parameters()
        for name, param in self._frozen:
            if param.requires_grad and param.grad is not None:
                raise refusals.unfrozen(name)

    def pass_stepped(self, update: Callable[[], Any]) -> Any:
        return self._own_step(update)

    def step(self, update: Callable[[], Any]) -> Any:
        result = self._own_step(update)
        began, stamp = time.perf_counter(), self.ctx.clock.stamp()
        figures = self.merges.merge(self.passes.step)
        if figures:
            self.phases.held_up_by_merge(stamp)
            self.phases.log(figures | {"merge_s": time.perf_counter() - began}, 1.0)
        return result

    def _own_step(self, update: Callable[[], Any]) -> Any:
        """The present worker's step. One that has no batch has computed on another one's, and takes none."""
        has_batch, self._has_batch = self._has_batch or self.passes.share > 0, False
        if not has_batch:
            self.phases.optimizer_began()
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler reads it
            return None
        if not has_scaler(self.optimizer):
            self._finite.check(self.passes.step, f" on worker {self.passes.ranks[self.merges.copies.shown]}")
        self.phases.optimizer_began()
        with self._late_changes.stepping():
            return update()

    # --- around a step ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self._finite.look_back(self.passes.step)
        self.merges.arrive()

    def finish(self) -> bool:
        return self.merges.finish()

    def merged(self) -> AbstractContextManager[None]:
        return self.merges.merged()

    def epoch_ended(self) -> None:
        self.settle()
        status = self.merges.status
        words = status.last_message(self.passes.step)
        status.judge(self.ctx.transport.tell_later(lambda: words).heard())  # as a merge of the others would send it
        self.merges.leaving = status.leave_next

    @property
    def leaving(self) -> bool:
        return self.merges.leaving

    def request_termination(self) -> None:
        self.merges.status.termination_requested = True

    def detach(self) -> None:
        self._late_changes.close()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def compressor_states(self) -> Sequence[State]:
        return self.merges.engine.states

    def restore_compressors(self, states: Sequence[State]) -> None:
        self.merges.engine.restore(states)

    def optimizer_state(self) -> dict[str, Any]:
        """Its options; each worker has a state of its own."""
        return {**self.optimizer.state_dict(), "state": {}}

    def shared_state(self) -> dict[str, Any]:
        return self.merges.shared_state()

    def worker_state(self, pass_index: int) -> dict[str, Any]:
        return self.merges.worker_state(pass_index)

    def restore(self, shared: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> None:
        self.merges.restore(shared, workers)
