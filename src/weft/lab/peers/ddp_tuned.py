from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from weft.lab.peers import Peer, all_reduced
from weft.ops import Spec
from weft.runtime.launch.malloc import keep_memory

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class DdpTuned(Peer):
    """DistributedDataParallel, made as fast as settings alone make it."""

    sentence: ClassVar[str] = (
        "DistributedDataParallel with a static graph, gradients as views of their buckets, buckets of 10 MiB, and "
        "an allocator that keeps its memory."
    )

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        from torch.nn.parallel import DistributedDataParallel

        keep_memory()
        return DistributedDataParallel(
            model, bucket_cap_mb=10, gradient_as_bucket_view=True, static_graph=True
        ), optimizer

    def bytes(self, specs: Sequence[Spec], workers: int) -> float:
        return all_reduced(specs, workers)


PEER = DdpTuned()
