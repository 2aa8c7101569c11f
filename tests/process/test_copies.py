"""The copies of the model that `weft check` names, counted in the memory of a worker."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.process.harness import spawn
from tests.process.training import fit
from weft.cli._explain import copies
from weft.strategy import Strategy

SIDE, LAYERS = 100, 5


def held() -> dict[int, int]:
    """The bytes of all tensors, by the address of their memory."""
    found = {}
    with torch._C.DisableTorchFunctionSubclass():  # gradients that were pushed must not be used
        for each in gc.get_objects():
            if issubclass(type(each), Tensor) and each.device.type == "cpu":
                memory = each.untyped_storage()
                found[memory.data_ptr()] = memory.nbytes()
    return found


def trains() -> float:
    """The memory of the tensors of a run after some steps, over that of the model."""
    gc.collect()
    before = held()
    run = weft.init(steps=5)
    model: Any = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(LAYERS)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = run.distribute(model, optimizer)
    fit(model, optimizer, run.shard([torch.ones(4, SIDE)] * 20))
    gc.collect()
    after = held()
    size = sum(4 * p.numel() for p in model.parameters())
    found = sum(size for address, size in after.items() if address not in before)
    run.close()
    return found / size


@pytest.mark.parametrize(
    "text",
    [
        "bsp / ring",
        "average(every=2) / bsp / ring",
        "outer(every=2) / bsp / direct",
        "streaming(every=2, fragments=2) / bsp / direct",
        "asp / parameter_server",
        "bsp / parameter_server",
        "bsp / parameter_server / sequential",
        "essp / parameter_server",
        "downpour(push=2, fetch=2) / asp / parameter_server",
    ],
)
def test_a_worker_holds_as_many_copies_as_check_says(text: str) -> None:
    """Where gradients are exchanged, they are in memory as well; under `direct`, so are parts of the sums."""
    strategy = Strategy.parse(text)
    expected = copies(strategy) + (0 if strategy.merges_models else 1)
    assert all(expected <= found < expected + 0.8 for found in spawn(2, trains, WEFT_STRATEGY=text))
