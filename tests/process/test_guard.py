"""Values that are not finite never reach a model or a residual; replicas that drift apart are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.process.harness import ChildError, spawn
from weft.runtime.checks import step_status as guard

SCHEDULES = ("sequential", "fused", "mg_wfbp", "priority(partition=4KiB, credit=16KiB, least=256B)")
COMPRESSIONS = ("dense", "cast(dtype=bf16)", "error_feedback(topk(ratio=0.1))", "error_feedback(cast(dtype=fp16))")
BAD_STEP, BAD_RANK, BAD_NAME = 7, 2, "2.weight"


def build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))


def spoil(model: nn.Module, run: Any, value: float, rank: int | None) -> None:
    """From BAD_STEP on one worker's gradient (or everyone's) of one parameter has such a value."""
    param = dict(model.named_parameters())[BAD_NAME]

    def hook(grad: torch.Tensor) -> torch.Tensor:
        if run.step + 1 == BAD_STEP and rank in (None, run.rank):
            grad = grad.clone()
            grad[3, 4] = value
        return grad

    param.register_hook(hook)


def finite(run: Any, model: nn.Module) -> bool:
    states = run._gradients.engine.states if run._gradients else []
    kept = [tensor for state in states for memory in state.values() for tensor in memory.values()]
    with torch._C.DisableTorchFunctionSubclass():  # a parameter that waits for a step that was refused waits for ever
        return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in [*model.parameters(), *kept])


def train(value: float, rank: int | None, steps: int = 12) -> tuple[str, bool]:
    """Returns how the run ended, and whether model and residuals are finite then."""
    run = weft.init(steps=steps)
    model = build().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.distribute(model, optimizer)
    spoil(model, run, value, rank)
    try:
        for x in run.shard([torch.randn(4, 8, generator=torch.Generator().manual_seed(2))] * 200):
            model(x.to(run.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.close()
    except weft.LoopError as error:
        return str(error), finite(run, model)
    return "nothing was noticed", finite(run, model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_rank_and_the_parameter_are_named(compression: str, schedule: str, value: float) -> None:
    strategy = f"bsp / direct / {compression} / {schedule}"
    outcomes = spawn(3, train, value, BAD_RANK, workers=4, WEFT_STRATEGY=strategy)
    for words, fine in outcomes:
        assert fine, "something that is not finite has got through"
        assert f"The gradient of {BAD_NAME} on worker {BAD_RANK} is NaN or infinite at step {BAD_STEP}." in words


@pytest.mark.parametrize("compression", ["cast(dtype=fp16)", "error_feedback(cast(dtype=fp16))"])
@pytest.mark.parametrize("schedule", ["fused", "priority"])
def test_a_sum_that_overflows_is_named(compression: str, schedule: str) -> None:
    strategy = f"bsp / ring / {compression} / {schedule}"
    for words, fine in spawn(2, train, 1e9, None, WEFT_STRATEGY=strategy):
        assert fine
        assert f"gradients of {BAD_NAME} are finite, but their sum is not, at step {BAD_STEP}" in words


def test_alone_too() -> None:
    [(words, fine)] = spawn(1, train, float("nan"), 0)
    assert fine and f"The gradient of {BAD_NAME} is NaN or infinite at step {BAD_STEP}." in words


def scaled(rank: int | None) -> tuple[int, float, list[float], bool]:
    """Under a scaler a step that is not finite is skipped by all, and training goes on."""
    run = weft.init(steps=12)
    model = build().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**10, growth_interval=1000)
    run.distribute(model, optimizer, scaler)
    spoiled = []

    def hook(grad: torch.Tensor) -> torch.Tensor:
        if run.step + 1 == BAD_STEP and len(spoiled) < 1 and rank == run.rank:
            spoiled.append(True)
            grad = torch.full_like(grad, torch.inf)
        return grad

    model[2].weight.register_hook(hook)
    backwards = 0
    for x in run.shard([torch.randn(4, 8, generator=torch.Generator().manual_seed(2))] * 200):
        loss = model(x.to(run.device)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        backwards += 1
    fine = finite(run, model)
    return backwards, scaler.get_scale(), [p.sum().item() for p in model.parameters()], fine


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("schedule", ["fused", "priority"])
def test_with_a_scaler_all_ranks_skip_the_step_together(compression: str, schedule: str) -> None:
    strategy = f"bsp / direct / {compression} / {schedule}"
    outcomes = spawn(4, scaled, BAD_RANK, WEFT_STRATEGY=strategy)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    backwards, scale, _, fine = outcomes[0]
    assert fine and scale == 2.0**9 and backwards == 13  # one more than there were steps


def drift(process: int) -> str:
    guard.HASH_EVERY = 3
    run = weft.init(steps=12)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.distribute(model, optimizer)
    try:
        for x in run.shard([torch.randn(4, 8, generator=torch.Generator().manual_seed(2))] * 200):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.step == 4 and run.world.process == process:
                with torch.no_grad():
                    model[0].bias.view(torch.int32)[3] ^= 1  # the last bit of one value
    except weft.LoopError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("schedule", ["fused", "priority"])
def test_a_replica_that_drifts_is_named(schedule: str) -> None:
    for words in spawn(3, drift, 1, WEFT_STRATEGY=f"bsp / direct / {schedule}"):
        assert "Replicas have diverged by step 6: process 1 differs from the others" in words
    assert spawn(3, drift, None, WEFT_STRATEGY=f"bsp / direct / {schedule}") == ["nothing was noticed"] * 3
    with pytest.raises(ChildError):
        spawn(2, drift)
