"""Linear layers' gradients travel as factors only where they are their product; training is that of dense ones."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.process.harness import spawn
from weft.compression.sufficient_factors import SufficientFactors

STEPS, BATCH = 4, 6


class Net(nn.Module):
    """A layer that runs once, one that may run twice, and one whose weight is another's too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.once, self.maybe, self.out = nn.Linear(40, 64), nn.Linear(64, 64), nn.Linear(64, 40)
        self.again = nn.Linear(64, 64)
        if kind == "tied":
            self.again.weight = self.maybe.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.maybe(self.once(x).tanh()).tanh()
        return self.out((self.maybe if self.kind == "twice" else self.again)(x).tanh())


def train(kind: str) -> tuple[dict[str, Tensor], dict[str, set[int]]]:
    """The model after some steps, and how many rows each weight's factors had."""
    rows: dict[str, set[int]] = {}
    ask = SufficientFactors._rows

    def noted(self: SufficientFactors, piece: Any, ctx: Any) -> int:
        found = ask(self, piece, ctx)
        rows.setdefault(piece.spec.name, set()).add(found)
        return found

    with mock.patch.object(SufficientFactors, "_rows", noted):
        run = weft.init()
        model: Any = Net(kind).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = run.distribute(model, optimizer, unused=True)
        random = torch.Generator().manual_seed(2)
        feed = [torch.randn(BATCH, 40, generator=random).double() for _ in range(2 * 2 * STEPS)]
        for number, x in enumerate(run.shard(feed)):
            loss = (model(x) - x).square().mean()
            if kind == "penalty":
                loss = loss + 1e-3 * model.maybe.weight.square().sum()
            if kind == "accumulated" and number % 2 == 0:
                with run.accumulate():
                    loss.backward()
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}, rows


@pytest.mark.parametrize("kind", ["plain", "twice", "tied", "penalty", "accumulated"])
def test_training_is_that_of_dense_gradients(kind: str) -> None:
    dense = spawn(2, train, kind, WEFT_STRATEGY="bsp / direct / dense")
    factored = spawn(2, train, kind, WEFT_STRATEGY="bsp / direct / sufficient_factors")
    for name, value in dense[0][0].items():
        assert torch.allclose(factored[0][0][name], value, rtol=0, atol=1e-10)
        assert torch.equal(factored[0][0][name], factored[1][0][name])
    rows = factored[0][1]
    assert rows["once.weight"] == rows["out.weight"] == ({BATCH} if kind != "accumulated" else {-1})
    assert rows["maybe.weight"] == ({BATCH} if kind == "plain" else {-1})
    assert rows["once.bias"] == {-1}
