"""One model in memory that all workers of a host share: `asp / shared_memory`.

Worker 0's values lie in a file that every process maps; parameters are views of it from then on, and each worker's own
optimizer steps them in place. No gradients are exchanged, and no worker waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import LoopError, PeerLost, UserError
from weft.runtime.checks.finite import LocalFiniteCheck
from weft.runtime.engine.bucket_layout import SavedLayout
from weft.runtime.loop.partial_step import has_scaler
from weft.runtime.modes import Mode, RunContext


@final
class SharedMemory(Mode):
    """Each worker's own optimizer steps the shared model."""

    connects: ClassVar[bool] = False

    def __init__(
        self, ctx: RunContext, model: nn.Module, optimizer: Optimizer, followers: Sequence[Any], *, unused: bool
    ) -> None:
        super().__init__(ctx, model, optimizer, followers, unused=unused)
        self._finite = LocalFiniteCheck(*zip(*model.named_parameters(), strict=True))

    def attach(self, layout: SavedLayout | None) -> None:
        world = self.ctx.world
        if not world.meeting or world.layout.workers > world.layout.processes:
            raise UserError(
                "shared_memory takes one machine and a process for each worker; start it with `weft train`, without "
                "--nodes and --processes"
            )
        folder = Path(world.meeting)
        share(self.model, self.optimizer, folder, first=world.process == 0, timeout_s=self.ctx.timeout_s)

    def step(self, update: Callable[[], Any]) -> Any:
        if not has_scaler(self.optimizer):
            self._finite.check(self.ctx.passes.step)
        self.ctx.phases.optimizer_began()
        return update()

    def settle(self) -> None:
        self._finite.look_back(self.ctx.passes.step)


def share(model: nn.Module, optimizer: Optimizer, folder: Path, *, first: bool, timeout_s: float) -> None:
    """Move a model's parameters into memory that is shared by all processes that use the same folder.

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
                f"{name} was moved to other memory, which the other workers do not share; write into it instead, as in "
                "p.data.copy_(values)"
            )


def _wait_for(file: Path, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not file.exists():
        if time.monotonic() > until:
            raise PeerLost(f"worker 0 did not share its model within {timeout_s:g} s; its own message says why")
        time.sleep(0.02)
