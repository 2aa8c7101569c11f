from __future__ import annotations

from dataclasses import dataclass
from typing import final

from weft.synchrony import Wrapper


@final
@dataclass(frozen=True, kw_only=True)
class NegativeMomentum(Wrapper):
    """Asynchrony of m workers acts as a momentum of 1 - 1/m, taken off the optimizer's [Mitliagkas et al. 2016].

    Where the loop asks for less than that, what is left is negative.
    """

    least: float = -0.9
    """The lowest that it becomes."""

    def __post_init__(self) -> None:
        if not -1 < self.least <= 0:
            raise ValueError(f"least is {self.least}, but must lie in (-1, 0]")

    def momentum(self, asked: float, workers: int) -> float:
        return max(self.least, self.inner.momentum(asked, workers) - (1 - 1 / workers))
