"""A thousand steps under every legal strategy of a product of answers: `make soak`."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.process.harness import spawn
from tests.process.training import fit, regression
from weft.axis import catalogue
from weft.strategy import Strategy, conflicts

STEPS = 1000
COMPRESSIONS = ("dense", "cast", "error_feedback(topk(ratio=0.05))")
SCHEDULES = ("sequential", "wfbp", "fused(bucket=4KiB, first=1KiB)")


def legal() -> list[str]:
    """Every strategy of this product that has no conflict."""
    product = itertools.product(catalogue("topology"), COMPRESSIONS, SCHEDULES)
    spelled = [f"bsp / {topology} / {compression} / {schedule}" for topology, compression, schedule in product]
    return [each for each in spelled if not any(conflicts(Strategy.parse(each)))]


def train() -> tuple[str, float, float]:
    """A thousand steps of a small network; returns a hash of its parameters, and its first and last loss."""
    run = weft.init(steps=STEPS)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(512, 16, generator=random)
    y = x[:, :4].prod(1, keepdim=True)
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    model, optimizer = run.distribute(model, optimizer)
    feed = run.shard([(x[i : i + 8], y[i : i + 8]) for i in range(0, 512, 8)], epochs=None)
    losses = fit(model, optimizer, feed, regression)
    state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    run.close()
    return hashlib.sha256(state).hexdigest(), sum(losses[:50]) / 50, sum(losses[-50:]) / 50


@pytest.mark.slow
@pytest.mark.parametrize("strategy", legal())
def test_replicas_stay_equal_for_a_thousand_steps(strategy: str) -> None:
    four = spawn(4, train, WEFT_STRATEGY=strategy)
    assert len({digest for digest, _, _ in four}) == 1
    assert all(last < first for _, first, last in four)
    if "direct" in strategy:
        assert {digest for digest, _, _ in spawn(3, train, workers=4, WEFT_STRATEGY=strategy)} == {four[0][0]}
