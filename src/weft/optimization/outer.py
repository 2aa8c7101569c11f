from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft.optimization import Merge, ModelMerging, State, at_least_one, fraction, positive
from weft.optimization._nesterov import outer_sgd

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Outer(ModelMerging):
    """Workers train copies, and an outer optimizer steps with their mean change: DiLoCo [Douillard et al. 2023].

    The outer gradient is the mean of anchor - copy. SGD with Nesterov's momentum steps the anchor with it, and the
    anchor replaces the copies. The workers' own optimizers, usually AdamW, keep their state.
    """

    every: int = 40
    """Inner steps between two outer ones."""
    lr: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.9
    """Outer momentum."""
    nesterov: bool = True
    """Whether the outer momentum is Nesterov's."""

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
        return outer_sgd(anchor, difference, state, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)
