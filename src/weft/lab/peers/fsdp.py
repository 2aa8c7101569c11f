from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from weft.lab.peers import Peer
from weft.lazy import torch
from weft.ops import Spec

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class Fsdp(Peer):
    """FSDP2 [Zhao et al. 2023]: each block of layers sharded over all hosts, gathered for forward and for backward."""

    sentence: ClassVar[str] = "FSDP2: parameters sharded, gathered for forward and for backward, gradients scattered."
    sleeps: ClassVar[bool] = False

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        names = {parameter: name for name, parameter in model.named_parameters()}
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in _blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        new = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [new[names[parameter]] for parameter in group["params"]]
        return model, optimizer

    def bytes(self, specs: Sequence[Spec], workers: int) -> float:
        return 3 * (workers - 1) / workers * sum(spec.nbytes for spec in specs)


def _blocks(model: nn.Module) -> list[Any]:
    """What is sharded by itself: the members of the model's longest sequence that have parameters."""
    sequences = [m for m in model.modules() if isinstance(m, (torch.nn.Sequential, torch.nn.ModuleList))]
    longest = max(sequences, key=len, default=None)
    members = list(longest) if longest is not None else []
    return [block for block in members if any(p.requires_grad for p in block.parameters())]


PEER = Fsdp()
