from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from weft.lab.peers import Peer
from weft.ops import Spec
from weft.runtime.launch.malloc import keep_memory

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class Alone(Peer):
    """Every host computes, nobody sends: what computing alone takes while all hosts are at it."""

    sentence: ClassVar[str] = "Every host trains for itself; nothing is exchanged."
    hidden: ClassVar[bool] = True

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        keep_memory()  # a bound is what computing takes at best
        return model, optimizer

    def bytes(self, specs: Sequence[Spec], workers: int) -> float:
        return 0.0


PEER = Alone()
