from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from weft.lab.peers import Peer, all_reduced
from weft.ops import Spec

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class DdpFp16(Peer):
    """DistributedDataParallel with its fp16 hook."""

    sentence: ClassVar[str] = "DistributedDataParallel with its fp16 hook: gradients all-reduced in half precision."

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped, optimizer

    def bytes(self, specs: Sequence[Spec], workers: int) -> float:
        return all_reduced(specs, workers, itemsize=2)


PEER = DdpFp16()
