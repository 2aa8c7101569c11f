from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from weft.lab.peers import Peer, all_reduced
from weft.ops import Spec

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class Ddp(Peer):
    """DistributedDataParallel as it comes [Li et al. 2020]: buckets of 25 MiB, reduced beside backward."""

    sentence: ClassVar[str] = "DistributedDataParallel as it comes: buckets of 25 MiB, all-reduced beside backward."

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model), optimizer

    def bytes(self, specs: Sequence[Spec], workers: int) -> float:
        return all_reduced(specs, workers)


PEER = Ddp()
