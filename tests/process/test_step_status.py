"""Values that are not finite never reach a model or a residual; replicas that drift apart are named."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.process.harness import ChildError, spawn
from tests.process.spoiled import BAD_NAME, BAD_RANK, BAD_STEP, build, scaled, train
from weft.runtime.checks import replicas

SCHEDULES = ("sequential", "fused", "mg_wfbp", "priority(partition=4KiB, credit=16KiB, least=256B)")
COMPRESSIONS = ("dense", "cast(dtype=bf16)", "error_feedback(topk(ratio=0.1))", "error_feedback(cast(dtype=fp16))")


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


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("schedule", ["fused", "priority"])
def test_with_a_scaler_all_ranks_skip_the_step_together(compression: str, schedule: str) -> None:
    strategy = f"bsp / direct / {compression} / {schedule}"
    outcomes = spawn(4, scaled, BAD_RANK, WEFT_STRATEGY=strategy)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    backwards, scale, _, fine = outcomes[0]
    assert fine and scale == 2.0**9 and backwards == 13  # one more than there were steps


def drift(process: int) -> str:
    replicas.HASH_EVERY = 3
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
