"""Another library's wrapper distributes the model: DistributedDataParallel, FSDP and the lab's other peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from weft.runtime.engine.bucket_layout import SavedLayout
from weft.runtime.loop import instruments
from weft.runtime.modes import Mode


@final
class Foreign(Mode):
    """The wrapper's own hooks and steps; the run deals data and records."""

    def prepare(self) -> None:
        """The wrapper broadcasts the model by itself."""

    @property
    def accepts_closure(self) -> bool:
        return self.ctx.world.alone

    def attach(self, layout: SavedLayout | None) -> None:
        """The wrapper attaches itself."""

    def step(self, update: Callable[[], Any]) -> Any:
        self.ctx.phases.optimizer_began()
        return update()

    def settle(self) -> None:
        """The wrapper's steps are complete when they return."""

    def loop_objects(self) -> tuple[nn.Module, Optimizer]:
        wrapper = instruments.foreign()
        assert wrapper is not None, "mode_of has found one"
        return wrapper.wrap(self.model, self.optimizer)
