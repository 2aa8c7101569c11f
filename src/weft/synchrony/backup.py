from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from weft.synchrony import Synchrony, View


@final
@dataclass(frozen=True, kw_only=True)
class Backup(Synchrony):
    """Synchronous with spare workers: a round closes without its last `spares` contributions [Chen et al. 2016].

    What comes after its round was closed is dropped, and its worker goes on with the new model.
    """

    lockstep: ClassVar[bool] = False

    spares: int = 1
    """b: how many a round does not wait for."""

    def __post_init__(self) -> None:
        if self.spares < 0:
            raise ValueError(f"spares is {self.spares}, but must not be negative")

    def may_start(self, me: int, view: View) -> bool:
        return view.version > view.reads[me]  # once the round that it has seen the model of is closed

    def quorum(self, view: View) -> int:
        return max(1, view.members - self.spares)

    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        return grad if staleness == 0 else None
