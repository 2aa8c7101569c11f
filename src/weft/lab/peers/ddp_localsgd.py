from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from weft.lab.peers import Peer, all_reduced
from weft.ops import Spec

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

PERIOD = 8
_START = 2
"""Steps of plain all-reduce before workers go on by themselves."""


class DdpLocalsgd(Peer):
    """DistributedDataParallel's post-local SGD [Lin et al. 2020]: models are averaged every 8 steps."""

    sentence: ClassVar[str] = "DistributedDataParallel with post-local SGD: models averaged every 8 steps."
    period: ClassVar[int] = PERIOD

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(model)
        alone = dist.new_subgroups(1)[0]
        state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=_START)
        wrapped.register_comm_hook(state, post_localSGD_hook)
        averager: Any = PeriodicModelAverager(period=PERIOD, warmup_steps=_START)
        return wrapped, PostLocalSGDOptimizer(optimizer, averager)

    def bytes(self, specs: Sequence[Spec], workers: int) -> float:
        return all_reduced(specs, workers) / PERIOD


PEER = DdpLocalsgd()
