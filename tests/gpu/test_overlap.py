"""Overlap on a GPU: exchanges run beside computing, on a stream of their own, and nothing is read early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.process.harness import spawn
from weft.runtime.engine.engine import BucketExchange
from weft.runtime.engine.lazy_parameter import LazyParameter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PRIORITY = "priority(partition=256KiB, credit=1MiB, least=4KiB)"
NCCL = {"WEFT_FORCE": "1", "WEFT_DEVICE": "cuda"}
GLOO = {"WEFT_DEVICE": "cuda", "WEFT_SHARE_GPUS": "1"}
STEPS = 12


def train(slow: bool) -> tuple[list[list[float]], int]:
    """What each layer's weights added up to when its forward began, and in how many steps updates were on their way.

    `slow`: every mean comes late on the engine's stream, so that an update which does not wait uses local gradients.
    """
    if slow:
        start = BucketExchange.start

        def late_start(self: BucketExchange) -> None:
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            start(self)

        BucketExchange.start = late_start  # type: ignore[method-assign]
    run = weft.init(steps=STEPS)
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    model: Any = nn.Sequential(*layers).to(run.device)
    sums: list[list[torch.Tensor]] = []
    for layer in layers[::2]:
        layer.register_forward_pre_hook(lambda m, _: sums[-1].append(m.weight.detach().double().sum()))
    model, optimizer = run.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    random = torch.Generator().manual_seed(2)
    data = [torch.randn(256, 1024, generator=random) for _ in range(run.workers * STEPS)]
    deferred = 0
    for x in run.shard(data):
        sums.append([])
        deferred += any(type(p) is LazyParameter for p in model.parameters())
        loss = model(x.to(run.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    result = [[value.item() for value in row] for row in sums]
    run.close()
    return result, deferred


@pytest.mark.parametrize(("processes", "env"), [(1, NCCL), (2, GLOO)], ids=["nccl", "gloo"])
@pytest.mark.parametrize("topology", ["direct", "ring"])
def test_no_layer_reads_weights_before_their_update(processes: int, env: dict[str, str], topology: str) -> None:
    ours = spawn(processes, train, True, WEFT_STRATEGY=f"bsp / {topology} / {PRIORITY}", **env)
    plain = spawn(processes, train, False, WEFT_STRATEGY=f"bsp / {topology} / wfbp", **env)
    assert [sums for sums, _ in ours] == [sums for sums, _ in plain]
    assert all(deferred > STEPS / 2 for _, deferred in ours) and not any(deferred for _, deferred in plain)


def spans(folder: Path) -> dict[int, dict[str, list[tuple[float, float]]]]:
    """The traced steps of process 0, on the device's clock."""
    steps: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for event in json.loads((folder / "trace-0.json").read_text())["traceEvents"]:
        if "step" in event.get("args", {}):
            name = "wire" if event["name"].startswith("bucket") else event["name"]
            steps.setdefault(event["args"]["step"], {}).setdefault(name, []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    return steps


def crossing(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    return any(a < d and c < b for a, b in one for c, d in other)


@pytest.mark.parametrize(("processes", "env"), [(1, NCCL), (2, GLOO)], ids=["nccl", "gloo"])
def test_exchanges_run_beside_backward(processes: int, env: dict[str, str], tmp_path: Path) -> None:
    out = {"WEFT_OUT": str(tmp_path / "run"), "WEFT_TRACE": "1"}
    spawn(processes, train, False, WEFT_STRATEGY="bsp / ring / wfbp", **env, **out)
    traced = spans(tmp_path / "run")
    assert sum(crossing(step["wire"], step["backward"]) for number, step in traced.items() if number > 4) > STEPS / 2


@pytest.mark.parametrize(("processes", "env"), [(1, NCCL), (2, GLOO)], ids=["nccl", "gloo"])
def test_the_next_forward_starts_before_the_last_mean_is_there(
    processes: int, env: dict[str, str], tmp_path: Path
) -> None:
    out = {"WEFT_OUT": str(tmp_path / "run"), "WEFT_TRACE": "1"}
    spawn(processes, train, True, WEFT_STRATEGY=f"bsp / direct / {PRIORITY}", **env, **out)
    traced = spans(tmp_path / "run")
    ahead = [traced[n + 1]["forward"][0][0] < max(end for _, end in traced[n]["wire"]) for n in range(6, STEPS)]
    assert all(ahead)
