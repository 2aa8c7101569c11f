"""The system in forty lines: a strategy is one value, and the same value is spelled, priced and run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from weft.ops import Place, Sum
from weft.strategy import Strategy
from weft.transport import virtual


def test_a_strategy_is_spelled() -> None:
    strategy = Strategy.parse("wfbp / ring / error_feedback(topk(0.05))")
    assert str(strategy) == "bsp / ring / error_feedback(topk(ratio=0.05)) / wfbp"
    assert Strategy.parse(str(strategy)) == strategy == Strategy.from_toml(strategy.to_toml())


def test_a_strategy_is_priced() -> None:
    place = Place(workers=8, latency_s=1e-4, bytes_per_s=1e8)
    for spelling, seconds in {"ring": 14 * (1e-4 + 1e6 / 8 / 1e8), "direct": 2 * (1e-4 + 7 * 1e6 / 8 / 1e8)}.items():
        topology = Strategy.parse(spelling).topology
        assert abs(virtual.cost(topology, Sum, 250_000, place).seconds - seconds) < 1e-12
        assert abs(topology.seconds(Sum, 1_000_000, place) - seconds) < 1e-12


def test_a_strategy_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers in one process give what one plain process gives on the joined batches."""
    batches = [torch.randn(5, 3, dtype=torch.float64) for _ in range(8)]
    plain = nn.Linear(3, 1, dtype=torch.float64)
    ours = nn.Linear(3, 1, dtype=torch.float64)
    ours.load_state_dict(plain.state_dict())
    for step in range(2):
        plain(torch.cat(batches[4 * step : 4 * step + 4])).square().mean().backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    monkeypatch.setenv("WEFT_WORKERS", "4")
    run = weft.init("bsp / direct / wfbp")
    model, optimizer = run.distribute(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    for x in run.shard(batches):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
