"""A compressor that works with momentum takes it over from the loop's SGD, or says why it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.process.harness import spawn
from tests.process.training import fit, squares

STRATEGY = {"WEFT_STRATEGY": "bsp / direct / dgc(ratio=0.1)"}


def train(optimizer: str, cycle: bool = False) -> tuple[str, list[float], float]:
    """How it ended, the last weights, and the momentum that the optimizer has then."""
    run = weft.init(steps=8)
    torch.manual_seed(1)
    model: Any = nn.Linear(20, 20)
    made = {
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "nesterov": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        "adam": lambda: torch.optim.AdamW(model.parameters()),
    }[optimizer]()
    try:
        model, made = run.distribute(model, made)
        schedulers = [torch.optim.lr_scheduler.OneCycleLR(made, max_lr=0.1, total_steps=20)] if cycle else []
        feed = run.shard([torch.randn(4, 20, generator=torch.Generator().manual_seed(2))] * 50)
        fit(model, made, feed, squares, *schedulers)
    except (weft.UserError, weft.LoopError) as error:
        return str(error), [], 0.0
    weights = model.weight.flatten().tolist()
    momentum = made.param_groups[0]["momentum"] if optimizer == "momentum" else 0.0
    run.close()
    return "", weights, momentum


def test_momentum_is_taken_over() -> None:
    ours = spawn(2, train, "momentum", **STRATEGY)
    assert all(words == "" and momentum == 0.0 for words, _, momentum in ours) and ours[0][1] == ours[1][1]
    [(_, _, alone)] = spawn(1, train, "momentum", **STRATEGY)
    assert alone == 0.9, "one worker has nothing to compress"


@pytest.mark.parametrize(
    ("optimizer", "cycle", "words"),
    [
        ("adam", False, "needs the momentum of SGD, but the optimizer is AdamW; use torch.optim.SGD"),
        ("nesterov", False, "takes over one plain momentum"),
        ("momentum", True, "the optimizer's momentum was set"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(optimizer: str, cycle: bool, words: str) -> None:
    assert all(words in said for said, _, _ in spawn(2, train, optimizer, cycle, **STRATEGY))
