"""Values that are not finite, on a GPU that nobody waits for: never in a model, named a step later, skipped by all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.process.harness import spawn
from tests.process.spoiled import BAD_NAME, BAD_STEP, scaled, train
from weft.runtime.checks.finite_gpu import DeferredFiniteCheck

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ALONE = (1, {"WEFT_DEVICE": "cuda"})
NCCL = (1, {"WEFT_DEVICE": "cuda", "WEFT_FORCE": "1"})
GLOO = (2, {"WEFT_DEVICE": "cuda", "WEFT_SHARE_GPUS": "1"})
SCHEDULES = ["fused", "priority(partition=4KiB, credit=16KiB, least=256B)"]


@pytest.mark.parametrize("steps", [12, BAD_STEP], ids=["going on", "at the end"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("where", [ALONE, NCCL, GLOO], ids=["alone", "nccl", "gloo"])
def test_the_rank_and_the_parameter_are_named(where: tuple[int, dict[str, str]], schedule: str, steps: int) -> None:
    processes, env = where
    strategy = f"bsp / direct / dense / {schedule}"
    outcomes = spawn(processes, train, float("nan"), processes - 1, steps, WEFT_STRATEGY=strategy, **env)
    for words, fine in outcomes:
        assert fine, "something that is not finite has got through"
        assert f"The gradient of {BAD_NAME}" in words and f"is NaN or infinite at step {BAD_STEP}." in words
        assert where == ALONE or f"on worker {processes - 1} is" in words


@pytest.mark.parametrize("compression", ["dense", "error_feedback(topk(ratio=0.1))"])
@pytest.mark.parametrize("where", [NCCL, GLOO], ids=["nccl", "gloo"])
def test_with_a_scaler_all_ranks_skip_the_step_together(where: Any, compression: str) -> None:
    processes, env = where
    outcomes = spawn(processes, scaled, processes - 1, WEFT_STRATEGY=f"bsp / direct / {compression}", **env)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    backwards, scale, _, fine = outcomes[0]
    assert fine and scale == 2.0**9 and backwards == 13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (5,), (8193,), (100, 300)])
def test_only_what_is_not_finite_becomes_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    good = torch.randn(shape, device="cuda").to(dtype)
    tensors = [good.clone(), good.clone(), good.clone().mT if len(shape) > 1 else good.clone()]
    tensors[1].view(-1)[-1] = torch.inf
    tensors[2][(0,) * tensors[2].dim()] = torch.nan
    notes = DeferredFiniteCheck(3)
    notes.shield([((number,), tensor) for number, tensor in enumerate(tensors)] + [((9,), None)])
    assert torch.equal(tensors[0], good) and not tensors[1].any() and not tensors[2].any()
    assert notes.read() == (1, None)
