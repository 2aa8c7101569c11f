from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from weft.lab.peers import Peer, all_reduced
from weft.ops import Spec


class DdpFp16(Peer):
    """DistributedDataParallel with its fp16 hook."""

    sentence: ClassVar[str] = "DistributedDataParallel with its fp16 hook: gradients all-reduced in half precision."

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped, optimizer

    def bytes(self, specs: Sequence[Spec], workers: int) -> float:
        return all_reduced(specs, workers, itemsize=2)


PEER = DdpFp16()
