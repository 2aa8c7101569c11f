from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from weft.synchrony import Synchrony, View

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Backup(Synchrony):
    """Synchronous with backup workers: a round closes without its last `spares` contributions [Chen et al. 2016].

    A contribution to a closed round is dropped, and its worker continues with the new model.
    """

    lockstep: ClassVar[bool] = False

    spares: int = 1
    """b: the number of contributions that a round does not wait for."""

    def __post_init__(self) -> None:
        if self.spares < 0:
            raise ValueError(f"spares is {self.spares}, but must not be negative")

    def may_start(self, me: int, view: View) -> bool:
        return view.version > view.reads[me]  # the round of the version that it read is closed

    def quorum(self, view: View) -> int:
        return max(1, view.members - self.spares)

    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        return grad if staleness == 0 else None
