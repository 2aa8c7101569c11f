"""Large-batch companions: what their papers say, alone and distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.process.harness import spawn
from tests.process.training import fit, squares, values
from weft.numerics import Lamb, Lars, LinearScaling

STEPS = 6


def build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "lars":
        return Lars(model.parameters(), lr=2.0, weight_decay=0.01, eta=0.1)
    return Lamb(model.parameters(), lr=0.01)


def batches(count: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(2)
    return [torch.randn(4, 6, generator=rng, dtype=torch.float64) for _ in range(count)]


def train(kind: str) -> list[float]:
    run = weft.init(steps=STEPS)
    model: Any = build()
    optimizer = make(kind, model)
    scheduler = LinearScaling(optimizer, workers=run.workers, warmup=3)
    model, optimizer, scheduler = run.distribute(model, optimizer, scheduler)
    fit(model, optimizer, run.shard(batches(2 * STEPS)), squares, scheduler)
    weights = values(model)
    run.close()
    return weights


@pytest.mark.parametrize("schedule", ["fused", "priority"])
@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_two_workers_are_one_with_twice_the_batch(kind: str, schedule: str) -> None:
    model = build()
    optimizer = make(kind, model)
    scheduler = LinearScaling(optimizer, workers=2, warmup=3)
    given = batches(2 * STEPS)
    fit(model, optimizer, map(torch.cat, zip(given[::2], given[1::2], strict=True)), squares, scheduler)
    alone = torch.tensor(values(model), dtype=torch.float64)
    for ours in spawn(2, train, kind, WEFT_STRATEGY=f"bsp / direct / {schedule}"):
        assert torch.allclose(torch.tensor(ours, dtype=torch.float64), alone, rtol=0, atol=1e-10)


def test_lars_is_its_formula() -> None:
    weight, bias = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5))
    w, b = weight.detach().clone(), bias.detach().clone()
    velocity, plain = torch.zeros_like(w), torch.zeros_like(b)
    optimizer = Lars([weight, bias], lr=0.5, momentum=0.8, weight_decay=0.1, eta=0.02)
    for step in range(4):
        g, h = torch.randn(4, 5), torch.randn(5)
        weight.grad, bias.grad = g.clone(), h.clone()
        optimizer.step()
        rate = 0.5 * 0.02 * w.norm() / (g.norm() + 0.1 * w.norm())
        velocity = 0.8 * velocity + rate * (g + 0.1 * w)
        plain = 0.8 * plain + 0.5 * h
        w, b = w - velocity, b - plain
        assert torch.allclose(weight, w, atol=1e-6) and torch.allclose(bias, b, atol=1e-6), step


def test_lamb_steps_by_the_size_of_the_weights() -> None:
    weight = nn.Parameter(torch.randn(4, 5))
    optimizer = Lamb([weight], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = torch.randn(4, 5)
        optimizer.step()
        assert float((weight.detach() - before).norm()) == pytest.approx(0.1 * float(before.norm()), rel=1e-4)


def test_what_is_zero_moves_at_the_plain_rate() -> None:
    for kind in (Lars, Lamb):
        weight = nn.Parameter(torch.zeros(2, 2))
        optimizer = kind([weight], lr=0.1)
        weight.grad = torch.ones(2, 2)
        optimizer.step()
        assert torch.isfinite(weight).all() and bool((weight < 0).all())
        weight.grad = torch.zeros(2, 2)
        optimizer.step()
        assert torch.isfinite(weight).all()


def test_rates_grow_in_a_straight_line_and_go_on() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = LinearScaling(optimizer, workers=8, warmup=4, after=lambda step: 0.5**step)
    rates = []
    for _ in range(7):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.1, 0.275, 0.45, 0.625, 0.8, 0.4, 0.2])
