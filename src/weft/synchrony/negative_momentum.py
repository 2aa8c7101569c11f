from __future__ import annotations

from dataclasses import dataclass
from typing import final

from weft.synchrony import Wrapper


@final
@dataclass(frozen=True, kw_only=True)
class NegativeMomentum(Wrapper):
    """Subtracts the momentum of 1 - 1/m that m asynchronous workers imply [Mitliagkas et al. 2016].

    If the loop's momentum is smaller than that, the result is negative.
    """

    least: float = -0.9
    """The lowest momentum."""

    def __post_init__(self) -> None:
        if not -1 < self.least <= 0:
            raise ValueError(f"least is {self.least}, but must lie in (-1, 0]")

    def momentum(self, requested: float, workers: int) -> float:
        return max(self.least, self.inner.momentum(requested, workers) - (1 - 1 / workers))
