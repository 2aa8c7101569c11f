"""Workers step copies of the model by themselves, and push to servers and fetch from them now and then: Downpour.

`step` adds this worker's own gradients up and updates its copy; the optimization decides after which steps the sum is
pushed, and after which the servers' model is fetched and merged. A save and the end of a run do both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from weft import optimization
from weft.optimization import State
from weft.runtime.modes import RunContext
from weft.runtime.modes.server_mode import ServerMode


@final
class LocalSteps(ServerMode):
    """Gradients stay in this process until `step`, as in a loop without servers; their sums are pushed."""

    def __init__(
        self, ctx: RunContext, model: nn.Module, optimizer: Optimizer, followers: Sequence[Any], *, unused: bool
    ) -> None:
        super().__init__(ctx, model, optimizer, followers, unused=unused)
        assert isinstance(ctx.strategy.optimization, optimization.LocalSteps)
        self.optimization = ctx.strategy.optimization
        self._name_of = {id(p): name for name, p in self.named.items()}
        self._mine: dict[str, Tensor] = {}
        """The copy as it is when the servers' model is fetched into its memory."""
        self._merge_state: dict[str, State] = {}
        self._accrued: dict[str, Tensor] = {}
        """Sums of this worker's own gradients that the servers do not have yet; flat."""
        self._shares: list[float] = []
        """Its share of the batch in each step since the last push."""
        self._moved = False
        """Whether a step was taken since the model was fetched."""

    def _take(self, name: str, param: Tensor, grad: Tensor) -> None:
        """It stays where it is."""

    def _announce(self) -> None:
        """A sum is announced with its push."""

    def _drop_gradients(self) -> None:
        """Gradients that no step has accumulated are dropped, as when a scaler skips a step."""
        self.came, self.local = set(), False

    def _step(self) -> None:
        """Accrue and move; push and fetch where that is due."""
        due = {exchange.what for exchange in self.optimization.due(self.passes.step)}
        self._numbers = self._hyper()
        self._accrue()
        self.came, self._moved, self._leaving = set(), True, self.termination_requested
        if "gradient" in due:
            self._push(self.passes.step)
        if "model" in due:
            self._fetch_model()

    def _accrue(self) -> None:
        """Add this step's gradients up, and step the copy with them. A worker without a batch has no gradient."""
        grads = self._own_gradients()
        self._shares.append(self.passes.share)
        if not self.passes.share:
            return
        for name, grad in grads.items():
            if name in self._accrued:
                self._accrued[name] += grad
            else:
                self._accrued[name] = grad.clone()
        for group in self.optimizer.param_groups:
            for name in [self._name_of[id(p)] for p in group["params"] if id(p) in self._name_of]:
                if name in grads:
                    self.optimization.local_update(self.flat[name], grads[name], group)

    def _own_gradients(self) -> dict[str, Tensor]:
        """This step's, flat; all of them are looked at before one of them counts."""
        grads = {}
        for name, p in self.named.items():
            if p.grad is None:
                self._absent(name)
            else:
                self._check(name, p.grad)
                grads[name] = p.grad.detach().reshape(-1)
        return grads

    def _push(self, step: int) -> None:
        """Push the accumulated gradients; their memory is not touched again."""
        self.client.pushed(self.timeout_s)  # the announcement of a push must not overtake the push before it
        for name, total in self._accrued.items():
            self._check(name, total)
        share = sum(self._shares) / len(self._shares)
        kept = self.buffers if self.passes.rank == 0 and self._accrued else ()
        self.client.begin(step, share, self._numbers, kept)
        for name in reversed(self.named):  # as backward finishes them
            self.client.push(name, self._accrued[name].mul_(share) if name in self._accrued else None, step)
        self._accrued, self._shares = {}, []

    def _fetch_model(self) -> None:
        """Merge the servers' model into the copy; worker 0 keeps its own buffers until it has pushed them."""
        for name, flat in self.flat.items():
            if name in self._mine:
                self._mine[name].copy_(flat)
            else:
                self._mine[name] = flat.clone()
        self._bring(() if self.passes.rank == 0 and self._accrued else self.buffers)
        self._moved = False

    def _received(self, name: str) -> None:
        """Merge them into the copy."""
        theirs = self.flat[name]
        merged, self._merge_state[name] = self.optimization.merge(
            "worker", self._mine[name], theirs, self._merge_state.get(name, {})
        )
        if merged is not theirs:
            theirs.copy_(merged)

    def _synchronize(self) -> None:
        """Push the accumulated gradients with the last step's options, and fetch the servers' model."""
        self.flush()
        if self._accrued:
            self._push(self.passes.step - 1)
        elif not self._moved:
            return
        self._fetch_model()
        self.flush()
