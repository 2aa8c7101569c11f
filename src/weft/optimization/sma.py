from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft.optimization import Merge, ModelMerging, State, at_least_one, fraction

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Sma(ModelMerging):
    """Corrects copies towards a central average model, which moves with momentum: CROSSBOW [Koliousis et al. 2019].

    A merge takes c_i = alpha (copy_i - anchor) from each worker: copy_i = copy_i - c_i, and
    anchor = anchor + sum of c_i + momentum (anchor - anchor before the last merge). Copies stay apart. In the paper c_i
    is that of the copy before the step's gradient; here a merge follows the step.
    """

    every: int = 1
    """Steps between two merges."""
    alpha: float = 0.0
    """The part of its distance by which a copy is corrected; 0: 1 / workers."""
    momentum: float = 0.9
    """Momentum of the central model."""

    def __post_init__(self) -> None:
        at_least_one(every=self.every)
        fraction(momentum=self.momentum)
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}, but must be between 0 and 1; 0 means 1 / workers")

    @property
    def outer_copies(self) -> int:
        return 1 if self.momentum else 0

    @property
    def period(self) -> int:
        return self.every

    def due(self, step: int) -> tuple[Merge, ...]:
        return (Merge(finish_step=step),) if (step + 1) % self.every == 0 else ()

    def merge(self, anchor: Tensor, difference: Tensor, state: State, workers: int) -> tuple[Tensor, State]:
        moved = anchor - difference * (self._rate(workers) * workers)
        if not self.momentum:
            return moved, state
        if "before" in state:
            moved += (anchor - state["before"]) * self.momentum
        return moved, {"before": anchor.clone()}

    def adopt(self, copy: Tensor, before: Tensor, after: Tensor, workers: int) -> Tensor:
        return copy - (copy - before) * self._rate(workers)

    def _rate(self, workers: int) -> float:
        return self.alpha or 1 / workers
