from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from weft.synchrony import Synchrony, View

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Asp(Synchrony):
    """Asynchronous: no worker waits, and each contribution is applied on arrival [Dean et al. 2012]."""

    lockstep: ClassVar[bool] = False

    @property
    def waits(self) -> bool:
        return False

    def may_start(self, me: int, view: View) -> bool:
        return True

    def quorum(self, view: View) -> int:
        return 1

    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        return grad
