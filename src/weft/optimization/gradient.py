from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from weft.optimization import Exchange, Optimization, State


@final
@dataclass(frozen=True, kw_only=True)
class Gradient(Optimization):
    """One logical optimizer: every worker steps the same one with the mean gradient."""

    def due(self, step: int) -> tuple[Exchange, ...]:
        return (Exchange(what="gradient", finish_step=step),)

    def merge(self, mine: Tensor, theirs: Tensor, state: State) -> tuple[Tensor, State]:
        return theirs, state
