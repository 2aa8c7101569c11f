"""One worker: nothing is exchanged. Gradients are checked before each update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from weft.runtime.checks.finite import LocalFiniteCheck
from weft.runtime.engine.bucket_layout import SavedLayout
from weft.runtime.loop.partial_step import has_scaler
from weft.runtime.modes import Mode, RunContext


@final
class Single(Mode):
    """The plain loop."""

    def __init__(
        self, ctx: RunContext, model: nn.Module, optimizer: Optimizer, followers: Sequence[Any], *, unused: bool
    ) -> None:
        super().__init__(ctx, model, optimizer, followers, unused=unused)
        named = dict(model.named_parameters())
        self._finite = LocalFiniteCheck(list(named), list(named.values()))

    @property
    def accepts_closure(self) -> bool:
        return True

    def attach(self, layout: SavedLayout | None) -> None:
        """There is nothing to hook into."""

    def step(self, update: Callable[[], Any]) -> Any:
        if not has_scaler(self.optimizer):
            self._finite.check(self.ctx.passes.step)
        self.ctx.phases.optimizer_began()
        return update()

    def settle(self) -> None:
        self._finite.look_back(self.ctx.passes.step)
