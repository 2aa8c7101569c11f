from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from weft.synchrony import Synchrony, View

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class ValueBound(Synchrony):
    """A worker's updates that others have not read yet may change a value by at most `delta` [Wei et al. 2015].

    Large updates at the start make workers wait, small ones later do not.
    """

    lockstep: ClassVar[bool] = False
    bounds_values: ClassVar[bool] = True

    delta: float = 0.1
    """The largest change of a value by a worker's updates that some worker has not read yet."""

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ValueError(f"delta is {self.delta}, but must be positive")

    def may_start(self, me: int, view: View) -> bool:
        return view.unseen[me] <= self.delta or view.clocks[me] == view.slowest

    def quorum(self, view: View) -> int:
        return 1

    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        return grad
