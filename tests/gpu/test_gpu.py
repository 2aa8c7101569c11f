"""What a GPU changes: streams, NCCL with one rank, and two processes that share the GPU over Gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.process.harness import spawn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS, BATCH = 8, 6
ENV = os.environ | {"PYTHONPATH": str(Path(weft.__file__).parents[1])}


def model(norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)]
    if norm:
        layers.insert(1, nn.SyncBatchNorm(64))
    return nn.Sequential(*layers)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(5)
    return [
        (torch.randn(BATCH, 16, generator=random), torch.randn(BATCH, 4, generator=random)) for _ in range(4 * STEPS)
    ]


def train(kwargs: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """A run in this process's place; returns the parameters on the CPU."""
    options = {"dtype": torch.float64, "scaler": False, "compiled": False, "norm": False} | (kwargs or {})
    run = weft.init(steps=STEPS)
    net: Any = model(options["norm"]).to(run.device, options["dtype"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", enabled=options["scaler"])
    net = torch.compile(net) if options["compiled"] else net
    net, optimizer, scaler = run.distribute(net, optimizer, scaler)
    for x, y in run.shard(batches()):
        with torch.autocast("cuda", dtype=torch.float16, enabled=options["scaler"]):
            out = net(x.to(run.device, options["dtype"]))
            loss = (out.to(options["dtype"]) - y.to(run.device, options["dtype"])).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer) if options["scaler"] else None
        run.clip(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.log(loss=loss)
    result = {k.removeprefix("_orig_mod."): v.detach().cpu() for k, v in net.state_dict().items()}
    run.close()
    return result


def joined(workers: int) -> dict[str, torch.Tensor]:
    """One plain process on the joined batches, without Weft."""
    net = model().to("cuda", torch.float64)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    data = batches()
    for step in range(STEPS):
        group = data[step * workers : (step + 1) * workers]
        x, y = (torch.cat(part).to("cuda", torch.float64) for part in zip(*group, strict=True))
        (net(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {k: v.detach().cpu() for k, v in net.state_dict().items()}


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-10) -> bool:
    return all(torch.allclose(one[k], other[k], rtol=tolerance, atol=tolerance) for k in other)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[k], other[k]) for k in other)


@pytest.mark.parametrize(
    "schedule",
    ["sequential", "wfbp", "fused(bucket=4KiB, first=1KiB)", "mg_wfbp", "priority(partition=4KiB, least=1KiB)"],
)
def test_nccl_with_one_rank_is_the_plain_loop(schedule: str) -> None:
    for topology in ("ring", "direct"):
        env = {"WEFT_FORCE": "1", "WEFT_DEVICE": "cuda", "WEFT_STRATEGY": f"bsp / {topology} / {schedule}"}
        (ours,) = spawn(1, train, **env)
        assert close(ours, joined(1))


@pytest.mark.parametrize("topology", ["direct", "ring", "halving_doubling"])
@pytest.mark.parametrize("compression", ["dense", "cast", "error_feedback(topk(ratio=0.1))"])
def test_two_processes_share_the_gpu_over_gloo(topology: str, compression: str) -> None:
    env = {"WEFT_DEVICE": "cuda", "WEFT_SHARE_GPUS": "1"}
    strategy = f"bsp / {topology} / {compression} / fused(bucket=4KiB, first=1KiB)"
    one, other = spawn(2, train, WEFT_STRATEGY=strategy, **env)
    assert same(one, other)
    if compression == "dense":
        assert close(one, joined(2))


def test_direct_has_the_same_bits_on_one_and_two_processes() -> None:
    env = {"WEFT_DEVICE": "cuda", "WEFT_SHARE_GPUS": "1", "WEFT_STRATEGY": "bsp / direct / wfbp"}
    (alone,) = spawn(1, train, workers=4, **env)
    two = spawn(2, train, workers=4, **env)
    assert same(alone, two[0]) and same(alone, two[1])
    assert close(alone, joined(4))


@pytest.mark.parametrize("options", [{"scaler": True}, {"compiled": True}, {"norm": True}])
def test_what_users_of_gpus_rely_on(options: dict[str, Any]) -> None:
    env = {"WEFT_FORCE": "1", "WEFT_DEVICE": "cuda", "WEFT_STRATEGY": "bsp / ring"}
    (ours,) = spawn(1, train, options | {"dtype": torch.float32}, **env)
    (alone,) = spawn(1, train, options | {"dtype": torch.float32}, WEFT_DEVICE="cuda")
    assert close(ours, alone, 1e-5)


def test_the_engine_works_on_a_stream_of_its_own(tmp_path: Path) -> None:
    """With NCCL and a traced run, exchanges are recorded on the device's clock."""
    env = {
        "WEFT_FORCE": "1",
        "WEFT_DEVICE": "cuda",
        "WEFT_STRATEGY": "bsp / ring / wfbp",
        "WEFT_OUT": str(tmp_path / "run"),
    }
    spawn(1, train, **env)
    events = [json.loads(line) for line in (tmp_path / "run" / "events-0.jsonl").read_text().splitlines()]
    assert len(events) == STEPS
    assert all(event["forward_s"] > 0 and event["backward_s"] > 0 for event in events)
    assert all(event["exposed_s"] + event["hidden_s"] > 0 for event in events)


def test_more_workers_than_gpus_is_one_sentence(tmp_path: Path) -> None:
    count = torch.cuda.device_count() + 1
    command = [sys.executable, "-m", "weft.cli", "train", "wide", "-n", str(count), "--device", "cuda"]
    done = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "GPU" in done.stderr and "--share-gpus" in done.stderr and "Traceback" not in done.stderr


def test_the_command_trains_on_the_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weft.cli", "train", "text", "--steps", "6", "--json", "-", "--", "--size", "2m"]
    done = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    environment = json.loads((tmp_path / row["folder"] / "environment.json").read_text())
    assert environment["device"] == "cuda:0" and row["steps"] == 6
