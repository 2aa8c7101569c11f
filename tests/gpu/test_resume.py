"""Going on on a GPU: its random numbers, its memory and its streams are part of a run's state."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.process.harness import ChildError, spawn
from tests.process.replicas import digest
from weft.store.checkpoint import newest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS, KILLED = 10, 7


def job(folder: str, kill: bool) -> tuple[str, list[str]]:
    """Dropout draws on the GPU; returns the final state and the losses of the steps that were taken here."""
    run = weft.init(out=folder, steps=STEPS, seed=2, save_every=2)
    torch.manual_seed(4)
    model: Any = nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.Dropout(0.3), nn.Linear(256, 8)).to(
        run.device
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=3)
    run.distribute(model, optimizer, scaler)
    random = torch.Generator().manual_seed(1)
    data = [torch.randn(16, 32, generator=random) for _ in range(60)]
    losses = []
    for x in run.shard(data, epochs=None):
        if kill and run.step + 1 == KILLED and run.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(x.to(run.device)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    state = model.state_dict(), optimizer.state_dict()["state"]
    final = digest(*({k: _cpu(v) for k, v in part.items()} for part in state))
    run.close()
    return final, losses


def _cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cpu(each) for key, each in value.items()}
    return value.cpu() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("strategy", ["bsp / direct", "bsp / direct / error_feedback(topk(ratio=0.1)) / priority"])
def test_killed_and_resumed_on_a_gpu_is_the_same_run(tmp_path: Path, strategy: str, processes: int) -> None:
    env = {"WEFT_STRATEGY": strategy, "WEFT_DEVICE": "cuda", "WEFT_SHARE_GPUS": "1" if processes > 1 else "0"}
    whole = spawn(processes, job, str(tmp_path / "whole"), False, workers=2, **env)
    with pytest.raises(ChildError):
        spawn(processes, job, str(tmp_path / "killed"), True, workers=2, fresh=True, **env)
    checkpoint = newest(tmp_path / "killed/checkpoints")[0]
    again = spawn(processes, job, str(tmp_path / "killed"), False, workers=2, WEFT_RESUME=str(checkpoint), **env)
    for (final, losses), (same, rest) in zip(whole, again, strict=True):
        assert same == final and losses[-len(rest) :] == rest and len(rest) < len(losses)
