from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from weft.synchrony import Synchrony, View
from weft.synchrony.ssp import Ssp

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Essp(Synchrony):
    """Eager stale synchronous: servers send new versions before a pull arrives [Dai et al. 2015].

    The staleness bound is that of ssp, and a worker waits only if the bound requires it. Its computation, and the
    values that the loop sees between steps, may therefore miss its own last updates. slack=0 waits for every worker
    and equals bsp.
    """

    lockstep: ClassVar[bool] = False

    slack: float = 3
    """s: the number of steps that a worker may be ahead of the slowest; inf: unbounded."""

    def __post_init__(self) -> None:
        Ssp(slack=self.slack)

    @property
    def eager(self) -> bool:
        return True

    @property
    def waits(self) -> bool:
        return Ssp(slack=self.slack).waits

    def may_start(self, me: int, view: View) -> bool:
        return Ssp(slack=self.slack).may_start(me, view)

    def quorum(self, view: View) -> int:
        return Ssp(slack=self.slack).quorum(view)

    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        return grad
