"""Training in which one gradient is not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import weft
from tests.process.training import fit

BAD_STEP, BAD_RANK, BAD_NAME = 7, 2, "2.weight"


def build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))


def spoil(model: nn.Module, run: Any, value: float, rank: int | None) -> None:
    """From BAD_STEP on one worker's gradient (or everyone's) of one parameter has such a value."""
    param = dict(model.named_parameters())[BAD_NAME]

    def hook(grad: torch.Tensor) -> torch.Tensor:
        if run.step + 1 == BAD_STEP and rank in (None, run.rank):
            grad = grad.clone()
            grad[3, 4] = value
        return grad

    param.register_hook(hook)


def finite(run: Any, model: nn.Module) -> bool:
    states = run._process.mode.compressor_states
    kept = [tensor for state in states for memory in state.values() for tensor in memory.values()]
    with torch._C.DisableTorchFunctionSubclass():  # a parameter that waits for a step that was refused waits for ever
        return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in [*model.parameters(), *kept])


def train(value: float, rank: int | None, steps: int = 12) -> tuple[str, bool]:
    """Returns how the run ended, and whether model and residuals are finite then."""
    run = weft.init(steps=steps)
    model = build().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.distribute(model, optimizer)
    spoil(model, run, value, rank)
    try:
        feed = run.shard([torch.randn(4, 8, generator=torch.Generator().manual_seed(2))] * 200)
        fit(model, optimizer, feed, lambda model, x: model(x.to(run.device)).square().mean())
        run.close()
    except weft.LoopError as error:
        return str(error), finite(run, model)
    return "nothing was noticed", finite(run, model)


def scaled(rank: int | None) -> tuple[int, float, list[float], bool]:
    """Under a scaler a step that is not finite is skipped by all, and training goes on."""
    run = weft.init(steps=12)
    model = build().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**10, growth_interval=1000)
    run.distribute(model, optimizer, scaler)
    spoiled = []

    def hook(grad: torch.Tensor) -> torch.Tensor:
        if run.step + 1 == BAD_STEP and len(spoiled) < 1 and rank == run.rank:
            spoiled.append(True)
            grad = torch.full_like(grad, torch.inf)
        return grad

    model[2].weight.register_hook(hook)
    backwards = 0
    for x in run.shard([torch.randn(4, 8, generator=torch.Generator().manual_seed(2))] * 200):
        loss = model(x.to(run.device)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        backwards += 1
    fine = finite(run, model)
    return backwards, scaler.get_scale(), [p.sum().item() for p in model.parameters()], fine
