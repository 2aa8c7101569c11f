"""Parameter servers with workers on a GPU: what passes through pinned memory is what a CPU would have sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.process.harness import ChildError, spawn
from weft.runtime.server.gpu_client import GpuServerClient

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = {"WEFT_DEVICE": "cuda", "WEFT_SHARE_GPUS": "1"}
STEPS = 8


def train(slow: bool = False, spoiled: bool = False) -> tuple[list[float], list[float]]:
    """Losses of each step, and the model in the end. `slow`: every copy to the host comes late on its stream."""
    if slow:
        copied = GpuServerClient._copied

        def late(self: GpuServerClient, pairs: Any) -> torch.cuda.Event:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            return copied(self, pairs)

        GpuServerClient._copied = late  # type: ignore[method-assign]
    run = weft.init(steps=STEPS)
    torch.manual_seed(3)
    layers = [nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4)]
    model: Any = nn.Sequential(*layers).double().to(run.device)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = run.distribute(model, optimizer, scheduler)
    random = torch.Generator().manual_seed(4)
    data = [torch.randn(32, 64, generator=random, dtype=torch.float64) for _ in range(2 * STEPS)]
    losses = []
    for x in run.shard(data):
        loss = (model(x.to(run.device)) - 1).square().mean()
        if spoiled and run.step == 2:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    weights = [value for each in model.state_dict().values() for value in each.double().flatten().tolist()]
    run.close()
    return losses, weights


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(
    "strategy",
    [
        "bsp / parameter_server(servers=2) / sequential",
        "bsp / colocated / wfbp",
        "bsp / colocated / priority",
        "ssp(slack=0) / parameter_server",
        "bsp / hierarchical(groups=2)",
    ],
)
def test_synchronous_servers_learn_what_a_gpu_learns_without(strategy: str, slow: bool) -> None:
    expected = spawn(2, train, WEFT_STRATEGY="bsp / direct", **GPU)
    for found, wanted in zip(spawn(2, train, slow, WEFT_STRATEGY=strategy, **GPU), expected, strict=True):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-10, abs=1e-10)


def test_compressed_pushes_are_those_of_a_cpu() -> None:
    strategy = "bsp / colocated / error_feedback(topk(ratio=0.3)) / priority"
    expected = spawn(2, train, WEFT_STRATEGY=strategy, WEFT_DEVICE="cpu")
    for found, wanted in zip(spawn(2, train, WEFT_STRATEGY=strategy, **GPU), expected, strict=True):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-8)


def test_one_worker_that_nobody_waits_for_learns_what_it_learns_alone() -> None:
    ((losses, weights),) = spawn(1, train, WEFT_STRATEGY="asp / parameter_server / priority", **GPU)
    ((expected, wanted),) = spawn(1, train, WEFT_STRATEGY="bsp / direct", **GPU)
    assert losses == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert weights == pytest.approx(wanted, rel=1e-10, abs=1e-10)


def test_values_that_are_not_finite_do_not_reach_the_servers() -> None:
    with pytest.raises(ChildError, match="NaN or infinite at step 3"):
        spawn(2, train, False, True, WEFT_STRATEGY="bsp / parameter_server", **GPU)
