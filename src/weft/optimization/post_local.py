from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft.optimization import Merge, ModelMerging, State, at_least_one

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class PostLocal(ModelMerging):
    """Workers average their copies in every step at first, and every few steps later [Lin et al. 2020].

    Early steps, with a high learning rate, are synchronous; from step `switch_at` on it is `average(every=...)`. Models
    are averaged in the first phase too: with SGD and batches of equal size this equals averaging gradients.
    """

    every: int = 8
    """Steps between two merges in the second phase."""
    switch_at: int = 0
    """The number of steps in the first phase."""

    def __post_init__(self) -> None:
        at_least_one(every=self.every)
        if self.switch_at < 0:
            raise ValueError(f"switch_at is {self.switch_at}, but must be at least 0")

    @property
    def period(self) -> int:
        """That of the second phase."""
        return self.every

    def due(self, step: int) -> tuple[Merge, ...]:
        merges = step < self.switch_at or (step + 1) % self.every == 0
        return (Merge(finish_step=step),) if merges else ()

    def merge(self, anchor: Tensor, difference: Tensor, state: State, workers: int) -> tuple[Tensor, State]:
        return anchor - difference, state
