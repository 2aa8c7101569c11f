from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft.optimization import Merge, ModelMerging, State, at_least_one, fraction, positive

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class BlockMomentum(ModelMerging):
    """Averages copies every few steps, and adds momentum to the change of the average: BMUF [Chen & Huo 2016].

    With G = mean of the copies - anchor: update = momentum * update + lr * G; anchor = copy = anchor + update.
    """

    every: int = 40
    """Steps in a block, between two merges."""
    momentum: float = 0.9
    """Block momentum; the paper's rule is 1 - 1 / workers."""
    lr: float = 1.0
    """Block learning rate."""

    def __post_init__(self) -> None:
        at_least_one(every=self.every)
        fraction(momentum=self.momentum)
        positive(lr=self.lr)

    @property
    def outer_copies(self) -> int:
        return 1 if self.momentum else 0

    @property
    def period(self) -> int:
        return self.every

    def due(self, step: int) -> tuple[Merge, ...]:
        return (Merge(finish_step=step),) if (step + 1) % self.every == 0 else ()

    def merge(self, anchor: Tensor, difference: Tensor, state: State, workers: int) -> tuple[Tensor, State]:
        update = difference * -self.lr
        if not self.momentum:
            return anchor + update, state
        if "update" in state:
            update += state["update"] * self.momentum
        return anchor + update, {"update": update}
