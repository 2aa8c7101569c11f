from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from weft.lab.peers import Peer, all_reduced
from weft.ops import Spec

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_LEAST_GAIN = 2
"""The hook leaves a matrix as it is unless its factors are so many times smaller."""


class DdpPowersgd(Peer):
    """DistributedDataParallel with its PowerSGD hook [Vogels et al. 2019], rank 1, in one bucket.

    The hook's steps of several buckets overlap, which aborts on Gloo: one bucket holds all.
    """

    sentence: ClassVar[str] = (
        "DistributedDataParallel with its PowerSGD hook: rank 1, one bucket (several abort on Gloo)."
    )

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        size = sum(p.numel() * p.element_size() for p in model.parameters())
        wrapped = DistributedDataParallel(model, bucket_cap_mb=math.ceil(2 * size / 2**20) + 1)
        state = PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook)
        return wrapped, optimizer

    def bytes(self, specs: Sequence[Spec], workers: int) -> float:
        whole = [spec for spec in specs if not _factored(spec)]
        sides = [Spec(spec.name, (_rows(spec) + _columns(spec),), spec.dtype) for spec in specs if _factored(spec)]
        return all_reduced([*whole, *sides], workers)


def _factored(spec: Spec) -> bool:
    return len(spec.shape) > 1 and (_rows(spec) + _columns(spec)) * _LEAST_GAIN < spec.numel


def _rows(spec: Spec) -> int:
    return spec.shape[0]


def _columns(spec: Spec) -> int:
    return spec.numel // spec.shape[0]


PEER = DdpPowersgd()
