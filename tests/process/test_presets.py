"""Every named system trains: two workers agree where they are to, and what they learn is worth something."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.process.harness import spawn
from tests.process.training import fit, regression, values
from weft import systems
from weft.strategy import Strategy

STEPS = 40
BY_STRATEGY = {str(each.strategy): each.id for each in systems.catalogue() if each.strategy is not None}
"""Systems of one strategy are run once."""


class Towers(nn.Module):
    """Two networks side by side: four layers, as many as fragments of a system."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.towers[0](x) + self.towers[1](x)  # type: ignore[no-any-return]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(2)
    secret = torch.randn(20, 5, generator=rng)
    inputs = [torch.randn(16, 20, generator=rng) for _ in range(2 * STEPS)]
    return [(x, x @ secret) for x in inputs]


def learn_by_preset() -> tuple[float, float, list[float]]:
    """Losses of all samples before and after, and the weights; gradients are large enough to pass fixed thresholds."""
    run = weft.init(steps=STEPS)
    torch.manual_seed(1)
    model: Any = Towers()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    model, optimizer = run.distribute(model, optimizer)
    before = judged(model)
    fit(model, optimizer, run.shard(batches()), lambda model, batch: 100 * regression(model, batch))
    after, weights = judged(model), values(model)
    run.close()
    return before, after, weights


@torch.no_grad()
def judged(model: nn.Module) -> float:
    return sum(regression(model, batch).item() for batch in batches())


@pytest.mark.parametrize("strategy", BY_STRATEGY, ids=BY_STRATEGY.values())
def test_a_preset_trains(strategy: str) -> None:
    (before, after, weights), (_, _, others) = spawn(2, learn_by_preset, WEFT_STRATEGY=strategy)
    synchronous = Strategy.parse(strategy).synchrony.lockstep
    assert weights == others or not synchronous
    assert after < before
