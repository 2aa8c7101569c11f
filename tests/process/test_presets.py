"""Every named system trains: two workers agree where they are to, and what they learn is worth something."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.process.harness import spawn
from weft import systems
from weft.strategy import Strategy

STEPS = 40
BY_STRATEGY = {str(each.strategy): each.id for each in systems.catalogue() if each.strategy is not None}
"""Systems of one strategy are run once."""


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(2)
    secret = torch.randn(20, 5, generator=rng)
    inputs = [torch.randn(16, 20, generator=rng) for _ in range(2 * STEPS)]
    return [(x, x @ secret) for x in inputs]


def train() -> tuple[float, float, list[float]]:
    """Losses of all samples before and after, and the weights; gradients are large enough to pass fixed thresholds."""
    run = weft.init(steps=STEPS)
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    model, optimizer = run.distribute(model, optimizer)
    before = judged(model)
    for x, y in run.shard(batches()):
        (100 * nn.functional.mse_loss(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = judged(model)
    weights = [value for p in model.parameters() for value in p.flatten().tolist()]
    run.close()
    return before, after, weights


@torch.no_grad()
def judged(model: nn.Module) -> float:
    return sum(nn.functional.mse_loss(model(x), y).item() for x, y in batches())


@pytest.mark.parametrize("strategy", BY_STRATEGY, ids=BY_STRATEGY.values())
def test_a_preset_trains(strategy: str) -> None:
    (before, after, weights), (_, _, others) = spawn(2, train, WEFT_STRATEGY=strategy)
    synchronous = Strategy.parse(strategy).synchrony.lockstep
    assert weights == others or not synchronous
    assert after < before
