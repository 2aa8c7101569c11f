"""Training with parameter servers: a job's script, and a loop whose bits are those of all-reduce."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import weft

JOB = """
import os, time
import torch, weft
from torch import nn

run = weft.init(steps=12)
torch.manual_seed(int(os.environ.get("WEFT_SERVER", 7)))  # servers build another model: worker 0's counts
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), {layer}nn.Linear(8, 2))
model.register_parameter("spare", nn.Parameter(torch.ones(3)))
optimizer = torch.optim.{optimizer}
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
model, optimizer, scheduler = run.distribute(model, optimizer, scheduler, unused={unused})
data = [torch.full((3, 4), 0.1 * float(i)) + torch.arange(3.0).view(3, 1) for i in range(24)]
for x in run.shard(data, epochs=None):
    time.sleep({sleep})
    with run.accumulate():
        (model(x) - 2).square().mean().backward()
    loss = (model(x).sin() - 1).square().mean() + {spare}
    loss.backward()
    {between}
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    run.log(loss=loss)
print(" ".join(p.double().sum().item().hex() for p in model.state_dict().values()))
"""
ADAM = "Adam(model.parameters(), lr=0.01)"
SGD = "SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)"


def script(
    folder: Path,
    optimizer: str = ADAM,
    between: str = "pass",
    layer: str = "",
    sleep: float = 0.0,
    unused: bool = False,
    spare: str = "0 * model.spare.sum()",
) -> None:
    how = {"optimizer": optimizer, "between": between, "layer": layer, "sleep": sleep, "unused": unused, "spare": spare}
    (folder / "job.py").write_text(JOB.format(**how))


def learn(kind: str, layer: str, unused: bool) -> tuple[list[float], list[float]]:
    """Losses of each step, and the model in the end."""
    run = weft.init(steps=9)
    torch.manual_seed(int(os.environ.get("WEFT_SERVER", 7)))  # servers build another model: worker 0's counts
    layers = {"norm": [nn.BatchNorm1d(8)], "dice": [nn.Dropout(0.2)]}.get(layer, [])
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *layers, nn.Linear(8, 2))
    model.register_parameter("spare", nn.Parameter(torch.ones(3)))
    optimizer: Any = OPTIMIZERS[kind](model.parameters())
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = run.distribute(model, optimizer, scheduler, unused=unused)
    data = [torch.full((3, 4), 0.1 * i) + torch.arange(3.0).view(3, 1) for i in range(20)]
    losses = []
    for x in run.shard(data, epochs=None):  # the last step of an epoch has batches for two workers of three
        loss = (model(x).sin() - 1).square().mean()
        if not unused or (run.rank + run.step) % 4 == 0:
            loss = loss + model.spare.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    weights = [value for each in model.state_dict().values() for value in each.double().flatten().tolist()]
    run.close()
    return losses, weights


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain": lambda p: torch.optim.SGD(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}
