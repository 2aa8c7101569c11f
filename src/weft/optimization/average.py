from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft.optimization import Merge, ModelMerging, State, at_least_one

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Average(ModelMerging):
    """Workers step copies of the model, and average them every few steps [SparkNet, Moritz et al. 2016; Stich 2019].

    anchor = copy = mean of the copies. The state of the workers' optimizers is not averaged. With SGD, momentum and
    batches of equal size, `every=1` equals `gradient`.
    """

    every: int = 1
    """Steps between two merges."""

    def __post_init__(self) -> None:
        at_least_one(every=self.every)

    @property
    def period(self) -> int:
        return self.every

    def due(self, step: int) -> tuple[Merge, ...]:
        return (Merge(finish_step=step),) if (step + 1) % self.every == 0 else ()

    def merge(self, anchor: Tensor, difference: Tensor, state: State, workers: int) -> tuple[Tensor, State]:
        return anchor - difference, state
