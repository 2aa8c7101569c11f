from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from weft.synchrony import Synchrony, View

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Softsync(Synchrony):
    """No worker waits; with m workers, every m / n contributions make one update [Zhang et al. 2016].

    The average staleness is n updates: n = 1 averages one contribution per worker on average, n = m is asynchronous.
    """

    lockstep: ClassVar[bool] = False

    n: int = 1
    """The number of updates in the time in which every worker contributes once."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is {self.n}, but must be at least 1")

    @property
    def waits(self) -> bool:
        return False

    def may_start(self, me: int, view: View) -> bool:
        return True

    def quorum(self, view: View) -> int:
        return max(1, view.members // self.n)

    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        return grad
