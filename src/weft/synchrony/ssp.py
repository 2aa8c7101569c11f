from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from weft.synchrony import Synchrony, View

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Ssp(Synchrony):
    """Stale synchronous: no worker is more than `slack` steps ahead of the slowest [Ho et al. 2013].

    Contributions are applied on arrival. slack=0 waits for every worker, makes one update per step and equals bsp;
    slack=inf equals asp.
    """

    lockstep: ClassVar[bool] = False

    slack: float = 3
    """s: the number of steps that a worker may be ahead of the slowest; inf: unbounded."""

    def __post_init__(self) -> None:
        if not self.slack >= 0 or (math.isfinite(self.slack) and self.slack != int(self.slack)):
            raise ValueError(f"slack is {self.slack}, but must be a whole number of at least 0, or inf")

    @property
    def waits(self) -> bool:
        return math.isfinite(self.slack)

    def may_start(self, me: int, view: View) -> bool:
        return view.clocks[me] - view.slowest <= self.slack

    def quorum(self, view: View) -> int:
        return 1 if self.slack else view.members

    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        return grad
