"""Sleeping compute leaves replicas as they are, and moves the models of local optimizers apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.process.harness import spawn
from tests.process.training import fit
from weft.lab.instruments.sleep import SleepingCompute
from weft.profile import Profile
from weft.runtime.loop.instruments import attached
from weft.runtime.record.run_folder import events


def asleep(folder: str) -> list[torch.Tensor]:
    """The model after six steps of sleeping compute."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    profile = Profile(forward_s=0.0, backward=tuple((name, 0.0) for name, _ in model.named_parameters()))
    with attached(SleepingCompute(profile=profile)):
        run = weft.init(out=folder, steps=6, save_every=0)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = run.distribute(model, optimizer)
        data = run.shard(DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=4), epochs=None)
        fit(model, optimizer, (x for (x,) in data))
        run.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("compressor", ["", " / int8", " / error_feedback(topk(ratio=0.1))"])
@pytest.mark.parametrize("processes", [2, 1])
def test_copies_differ_with_sleeping_compute(processes: int, compressor: str, tmp_path: Path) -> None:
    """Each of two steps changes a value by about the learning rate; a merge makes models equal."""
    strategy = f"average(every=2) / bsp / direct{compressor}"
    rows = spawn(processes, asleep, str(tmp_path), workers=2, WEFT_STRATEGY=strategy)
    found = [event["consensus"] for event in events(tmp_path) if event.get("merges")]
    assert len(found) == 3 and all(0.01 < each < 0.5 for each in found)
    assert all(map(torch.equal, rows[0], rows[-1]))


@pytest.mark.parametrize("strategy", ["bsp / direct", "bsp / ring / int8"])
def test_replicas_stay_equal_with_sleeping_compute(strategy: str, tmp_path: Path) -> None:
    first, second = spawn(2, asleep, str(tmp_path), WEFT_STRATEGY=strategy)
    assert all(map(torch.equal, first, second))
