"""A worker among servers: hooks push gradients as backward finishes them, and a step pulls the new model.

Under `priority` the step returns at once, and the first access to a parameter waits for it (`engine/lazy_parameter`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from weft.runtime.checks.finite import check_gradient
from weft.runtime.engine.buckets import LOOKED_AT, weigh
from weft.runtime.loop import refusals
from weft.runtime.modes import RunContext
from weft.runtime.modes.server_mode import ServerMode
from weft.runtime.server.pushed_gradient import PushedGradient


@final
class ParameterServer(ServerMode):
    """Gradients leave as soon as autograd has finished them, or in `step` where the schedule does not overlap."""

    def __init__(
        self, ctx: RunContext, model: nn.Module, optimizer: Optimizer, followers: Sequence[Any], *, unused: bool
    ) -> None:
        super().__init__(ctx, model, optimizer, followers, unused=unused)
        self.raw = ctx.strategy.compression.raw
        self._held: dict[str, Tensor | None] = {}
        """Gradients that wait for `step`, where the schedule does not overlap."""

    def check_clip(self) -> None:
        raise refusals.no_clipping_with_servers()

    def _take(self, name: str, param: Tensor, grad: Tensor) -> None:
        """Push a gradient now, or in `step` where the schedule does not overlap."""
        flat = self._weighed(name, grad)
        given = flat if self.passes.share > 0 or not self.raw else None  # a worker without a batch has no gradient
        if self.overlaps:
            self.client.push(name, given, self.passes.step, self.pull.coming)
        else:
            self._held[name] = given
        param.grad = PushedGradient.of(grad)

    def _weighed(self, name: str, grad: Tensor) -> Tensor:
        """A gradient times this worker's share, flat, and looked at; where that can be, in one pass over memory."""
        if grad.is_sparse or grad.is_cuda or grad.dtype not in LOOKED_AT:
            self._check(name, grad)
            return grad.resolve_conj().reshape(-1).mul_(self.passes.share)
        flat = grad.reshape(-1)
        if not weigh(flat, self.passes.share):
            check_gradient(name, flat, self.passes.step)
        return flat

    def _announce(self) -> None:
        """Announce the step: its share, the optimizer's options and, by worker 0, the buffers."""
        self._numbers = self._hyper()
        kept = self.buffers if self.passes.rank == 0 and self.passes.share > 0 else ()
        if self.eager is not None:
            began = self.phases.clock.stamp()
            self.eager.begin(kept)
            self.phases.held_up(began)
        leave = self.termination_requested and self.synchrony.lockstep
        self.client.begin(self.passes.step, self.passes.share, self._numbers, kept, leave=leave)

    def _step(self) -> None:
        """Push what is left and pull the model. Returns when the synchrony lets this worker start its next step."""
        self._check_gradients()
        for name, p in self.named.items():
            if name not in self.came and p.grad is not None:  # a backward inside accumulate() alone has reached it
                self._take(name, p, p.grad)
            elif name not in self.came:
                self._absent(name)
                self.client.push(name, None, self.passes.step, self.pull.coming)
        for name, grad in self._held.items():
            self.client.push(name, grad, self.passes.step)
        if self._held:
            self.client.pushed(self.timeout_s)  # nothing overlaps
        self._held = {}
        if self._numbers != self._hyper():
            raise refusals.options_changed_after_push()
        self.came = set()
        if self.eager is not None:
            self.eager.step()
            self._leaving = self.termination_requested
            return
        self._fetch_model()

    def _fetch_model(self) -> None:
        self._bring(self.buffers)

    def _drop_gradients(self) -> None:
        """Those that were pushed count."""

    def _received(self, name: str) -> None:
        """The servers' model is this worker's."""

    def _synchronize(self) -> None:
        """Every step pushes its gradients and pulls the model."""

    def _check_gradients(self) -> None:
        """The servers step with the gradients that were pushed; a later change would be lost."""
        for name in self.came:
            if type(self.named[name].grad) is not PushedGradient:
                raise refusals.changed_after_push(name)
