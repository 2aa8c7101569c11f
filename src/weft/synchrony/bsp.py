from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from weft.synchrony import Synchrony, View

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Bsp(Synchrony):
    """Bulk synchronous: every step waits for every worker [Valiant 1990]."""

    lockstep: ClassVar[bool] = True

    def may_start(self, me: int, view: View) -> bool:
        return view.clocks[me] == view.slowest

    def quorum(self, view: View) -> int:
        return view.members

    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        return grad if staleness == 0 else None
