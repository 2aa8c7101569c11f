from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from weft.synchrony import Synchrony, View
from weft.synchrony.ssp import Ssp


@final
@dataclass(frozen=True, kw_only=True)
class Essp(Synchrony):
    """Stale synchronous, eagerly: servers send what is new before anybody asks for it [Dai et al. 2015].

    The bound is that of ssp, and a worker waits only where it demands that. So what it computes with, and what a loop
    sees between steps, may lack its own last updates, too. With no slack a step takes everyone: that is bsp.
    """

    lockstep: ClassVar[bool] = False

    slack: float = 3
    """s: steps that a worker may be ahead; inf: any number."""

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
