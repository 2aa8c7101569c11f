"""Every schedule with every loop, on four workers in float64, equals one plain process on the joined batch to 1e-10."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tests.process.harness import spawn
from tests.process.loop_cases import (
    Branches,
    accumulate,
    adamw,
    channels_last,
    checkpointed,
    clip,
    clip_by_torch,
    every_second,
    everything,
    frozen,
    kept,
    lambda_lr,
    one_cycle,
    plain,
    scaler,
    shared,
    twice,
    unused,
    unused_accumulated,
    unused_unsaid,
    unused_zeroed,
)
from tests.process.loop_data import (
    LIST_SIZES,
    batched_dataset,
    dropped,
    own,
    own_list,
    own_overflow,
    own_sizes,
    own_unused,
    streamed,
    uneven,
    uneven_list,
    uneven_sizes,
    workers_of_a_loader,
)
from tests.process.loop_grounds import (
    SCHEDULES,
    WORKERS,
    Plain,
    Told,
    Trained,
    batches,
    child,
    even_sizes,
    mlp,
    mse,
    sgd,
    state_of,
)
from tests.process.loop_norms import (
    batchnorm,
    batchnorm_accumulated,
    batchnorm_accumulated_by_hand,
    batchnorm_by_hand,
    batchnorm_own,
    batchnorm_own_by_hand,
    normed_sizes,
)


@functools.cache
def reference(loop: Callable[[Any], dict[str, Any]]) -> Trained:
    if loop in BY_HAND:
        return BY_HAND[loop]()
    run = Plain()
    return loop(run), run.losses


@functools.cache
def trained(loop: Callable[[Any], dict[str, Any]], processes: int) -> dict[str, Trained]:
    """Four workers under each schedule; the replicas' states are bit-equal, so one stands for all."""
    rows = spawn(processes, child, loop, list(SCHEDULES.values()), workers=WORKERS)
    outcomes = {}
    for name, parts in zip(SCHEDULES, zip(*rows, strict=True), strict=True):
        state = parts[0][0]
        for other, _ in parts[1:]:
            assert list(other) == list(state)
            assert all(same_bits(other[key], state[key]) for key in state), f"replicas differ under {name}"
        by_rank = {rank: losses for _, told in parts for rank, losses in told.items()}
        assert sorted(by_rank) == list(range(WORKERS))
        outcomes[name] = state, joined_losses(by_rank, SIZES.get(loop, even_sizes)())
    return outcomes


def joined_losses(by_rank: dict[int, list[float]], sizes: list[list[int]]) -> list[float]:
    """The loss of each joined batch; `sizes` by step and worker, 0 where a worker has no batch."""
    assert all(len(losses) == len(sizes) for losses in by_rank.values())
    return [sum(n * by_rank[rank][t] for rank, n in enumerate(row) if n) / sum(row) for t, row in enumerate(sizes)]


def same_bits(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def close(got: Any, wanted: Any) -> bool:
    """Equal to 1e-10 of the largest value; what is not finite must be the same."""
    got, wanted = (torch.as_tensor(value, dtype=torch.float64) for value in (got, wanted))
    finite = wanted.isfinite()
    if got.shape != wanted.shape or not torch.equal(got.isfinite(), finite):
        return False
    scale = wanted[finite].abs().max() if finite.any() else torch.ones(())
    return bool(((got - wanted)[finite].abs() <= 1e-10 * scale).all())


BY_HAND: dict[Any, Callable[[], Trained]] = {
    batchnorm: batchnorm_by_hand,
    batchnorm_accumulated: batchnorm_accumulated_by_hand,
    batchnorm_own: batchnorm_own_by_hand,
}
SIZES: dict[Any, Callable[[], list[list[int]]]] = {
    uneven: uneven_sizes,
    uneven_list: lambda: LIST_SIZES,
    own: own_sizes,
    own_list: own_sizes,
    own_unused: own_sizes,
    own_overflow: own_sizes,
    batched_dataset: uneven_sizes,
    streamed: uneven_sizes,
    dropped: lambda: even_sizes()[:5],
    batchnorm_own: normed_sizes,
}
REPEATED = [twice, every_second, kept]
OWN = [own, own_list, own_unused, own_overflow, batchnorm_own]
ANYWHERE = [
    plain,
    adamw,
    clip,
    clip_by_torch,
    accumulate,
    scaler,
    frozen,
    unused,
    unused_unsaid,
    unused_zeroed,
    unused_accumulated,
    shared,
    one_cycle,
    lambda_lr,
    everything,
    uneven,
    uneven_list,
    workers_of_a_loader,
    batched_dataset,
    streamed,
    dropped,
    channels_last,
    checkpointed,
    batchnorm,
    batchnorm_accumulated,
]
EQUAL = [(loop, n) for loop in ANYWHERE for n in (WORKERS, 1)] + [(loop, WORKERS) for loop in [*OWN, *REPEATED]]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("loop", "processes"), EQUAL, ids=[f"{loop.__name__}-{n}" for loop, n in EQUAL])
def test_equals_one_process_on_the_joined_batch(loop: Any, processes: int, schedule: str) -> None:
    state, losses = trained(loop, processes)[schedule]
    wanted, wanted_losses = reference(loop)
    assert list(state) == list(wanted)  # plain names, in the model's own order
    assert len(losses) == len(wanted_losses) and close(losses, wanted_losses)
    for key, value in wanted.items():
        assert close(state[key], value), key


def test_what_a_loop_does_shows_in_its_result() -> None:
    """Each feature moves the reference, so that leaving it out could not pass."""
    base = reference(plain)[0]["0.weight"]
    for loop in (adamw, clip, accumulate, scaler, frozen, one_cycle, lambda_lr, uneven, uneven_list, own, *REPEATED):
        assert not torch.allclose(reference(loop)[0]["0.weight"], base, rtol=1e-6), loop.__name__
    state, start = reference(unused)[0], Branches().state_dict()
    assert state["none"] == [False] * 3 + [True] * 2 + [False]
    assert torch.equal(state["spare.weight"], start["spare.weight"])
    assert torch.equal(reference(frozen)[0]["2.weight"], mlp()[2].weight)
    assert reference(scaler)[0]["scale"] == 2.0**10 * 2 / 2 * 2
    assert [torch.tensor(loss).isfinite().item() for loss in reference(scaler)[1]] == [True, True, False] + [True] * 3
    for one, other, key in (
        (unused_unsaid, unused_zeroed, "branch.weight"),
        (unused, unused_accumulated, "branch.weight"),
        (batchnorm, batchnorm_accumulated, "1.running_mean"),
        (batchnorm, batchnorm_own, "1.running_var"),
    ):
        assert not torch.allclose(reference(one)[0][key], reference(other)[0][key], rtol=1e-6), other.__name__


def compiled(run: Any) -> dict[str, Any]:
    inner = mlp()
    model = torch.compile(inner, backend="aot_eager") if isinstance(run, Told) else inner
    model, optimizer = run.distribute(model, sgd(inner))
    for x, y in run.shard(batches()):
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(inner)


@pytest.mark.parametrize("processes", [2, 1])
def test_a_compiled_model_equals_a_plain_one(processes: int) -> None:
    rows = spawn(processes, child, compiled, [SCHEDULES["fused"]], workers=WORKERS)
    wanted, wanted_losses = reference(compiled)
    losses = joined_losses({r: told for row in rows for r, told in row[0][1].items()}, even_sizes())
    assert close(losses, wanted_losses)
    for row in rows:
        assert all(close(row[0][0][key], value) for key, value in wanted.items())


@pytest.mark.parametrize("processes", [2, 1])
def test_a_scheduler_may_be_made_after_distribute(processes: int) -> None:
    (state, _), *_ = spawn(processes, child, late_scheduler, [SCHEDULES["fused"]], workers=processes)[0]
    assert set(state) == set(mlp().state_dict())


def late_scheduler(run: Any) -> dict[str, Any]:
    model = mlp()
    model, optimizer = run.distribute(model, sgd(model))
    decay = LambdaLR(optimizer, lambda step: 0.7**step)
    for x, y in run.shard(batches(24)):
        mse(model(x), y).backward()
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
    return state_of(model)
