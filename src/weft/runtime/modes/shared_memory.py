"""One model in memory that all workers of a host share: `asp / shared_memory`.

Worker 0's values lie in a file that every process maps; parameters are views of it from then on, and each worker's own
optimizer steps them in place. There is nothing else to it: no gradients are exchanged, nobody waits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import LoopError, PeerLost, UserError


def share(model: nn.Module, optimizer: Optimizer, folder: Path, *, first: bool, timeout_s: float) -> None:
    """Move a model's parameters into memory that is shared with whoever shares in the same folder.

    From then on a step raises LoopError where the loop has given a parameter other memory.
    """
    params = list(model.parameters())
    if any(p.device.type != "cpu" for p in params):
        raise UserError("shared_memory trains on CPUs; use --device cpu, or another topology, such as direct")
    ready, file = folder / "model-shared", folder / "model"
    sizes = [-(-p.numel() * p.element_size() // 64) * 64 for p in params]
    if first:
        with file.open("wb") as whole:
            whole.truncate(sum(sizes))
    else:
        _wait_for(ready, timeout_s)
    memory = torch.from_file(str(file), shared=True, size=sum(sizes), dtype=torch.uint8)
    at = 0
    for p, size in zip(params, sizes, strict=True):
        view = memory[at : at + p.numel() * p.element_size()].view(p.dtype).view(p.shape)
        if first:
            view.copy_(p.detach())
        p.data = view
        at += size
    if first:
        ready.touch()
    shared = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    optimizer.register_step_pre_hook(lambda *_: _check(shared))


def _check(shared: Mapping[str, tuple[Tensor, int]]) -> None:
    for name, (p, address) in shared.items():
        if p.data_ptr() != address:
            raise LoopError(
                f"{name} was given other memory, and the other workers train what it was; write into it instead, as "
                "p.data.copy_(values) does"
            )


def _wait_for(file: Path, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not file.exists():
        if time.monotonic() > until:
            raise PeerLost(f"worker 0 did not share its model within {timeout_s:g} s; its own message says why")
        time.sleep(0.02)
