"""Loops that would train wrong are refused, and the message has a remedy."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import weft
from tests.process.harness import ChildError, spawn
from tests.process.loop_cases import Branches, branched, every_second, kept, twice
from tests.process.loop_data import own, own_loaders
from tests.process.loop_grounds import DENSE, WORKERS, Batch, batches, child, dataset, fit, mlp, mse, sgd
from tests.process.loop_norms import normed


def apart(run: Any) -> dict[str, Any]:
    """Two backwards before a step that reach different parameters: the first ones' mean would be sent again."""
    model = mlp()
    model, optimizer = run.distribute(model, sgd(model), unused=True)
    for x, y in run.shard(batches()):
        model[0](x).square().mean().backward()
        mse(model[4](x[:, :1].expand(-1, 8)), y).backward()
        optimizer.step()
    return {}


def uneven_micro(run: Any) -> dict[str, Any]:
    """The last joined batch is uneven, and it is the last of a step's three."""
    return micro(run, run.shard(batches(64)), 3)


def uneven_micro_within(run: Any) -> dict[str, Any]:
    """The last joined batch is uneven, and it is the second of a step's four."""
    return micro(run, run.shard(batches(64)), 4)


def own_micro(run: Any) -> dict[str, Any]:
    return micro(run, run.own(own_loaders()), 3)


def leftover(run: Any) -> dict[str, Any]:
    """Each epoch ends with two micro-batches of three; the next epoch adds to them."""
    feed = run.run.shard(batches(3 * WORKERS * 5), epochs=2)
    return micro(run, feed, 3)


def micro(run: Any, feed: Iterable[Batch], size: int) -> dict[str, Any]:
    model = mlp()
    model, optimizer = run.distribute(model, sgd(model))
    for i, (x, y) in enumerate(feed):
        with run.accumulate() if (i + 1) % size else contextlib.nullcontext():
            mse(model(x), y).backward()
        if (i + 1) % size == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {}


def never_exchanged(run: Any) -> dict[str, Any]:
    model = mlp()
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.shard(batches()):
        with run.accumulate():
            mse(model(x), y).backward()
        optimizer.step()
    return {}


def vanishing(run: Any) -> dict[str, Any]:
    """Everything has a gradient at the first step; later one worker leaves the branch out."""
    model = Branches(spare=False)
    takers = [(0, r) for r in range(WORKERS)] + [(1, r) for r in range(WORKERS) if r != 1]
    return fit(run, model, sgd(model), run.shard(branched(takers)))


def sparse(run: Any) -> dict[str, Any]:
    model = nn.Embedding(5, 3, sparse=True).double()
    model, _ = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in run.shard(batches()):
        mse(model((x[:, 0] > 0).long()), y).backward()
    return {}


def foreign(run: Any) -> dict[str, Any]:
    model = mlp()
    return fit(run, model, torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()]), [])


def all_frozen(run: Any) -> dict[str, Any]:
    model = mlp().requires_grad_(False)
    return fit(run, model, sgd(model), [])


def thawed(run: Any) -> dict[str, Any]:
    model = mlp()
    model[0].requires_grad_(False)
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.shard(batches()):
        mse(model(x), y).backward()
        optimizer.step()
        model[0].requires_grad_(True)
    return {}


def closure(run: Any) -> dict[str, Any]:
    model = mlp()
    model, optimizer = run.distribute(model, torch.optim.LBFGS(model.parameters(), lr=0.1))
    for x, y in run.shard(batches()):

        def evaluate(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss

        optimizer.step(evaluate)
    return {}


def second_order(run: Any) -> dict[str, Any]:
    model = mlp()
    model, _ = run.distribute(model, sgd(model))
    for x, y in run.shard(batches()):
        mse(model(x), y).backward(create_graph=True)
    return {}


def sampled(run: Any) -> dict[str, Any]:
    data, model = dataset(), mlp()
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=0)
    return fit(run, model, sgd(model), run.shard(DataLoader(data, batch_size=3, sampler=sampler)))


def synced_norm(run: Any) -> dict[str, Any]:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(normed())
    return fit(run, model, sgd(model), [])


def empty(run: Any) -> dict[str, Any]:
    model = mlp()
    return fit(run, model, sgd(model), run.shard([]))


def own_empty(run: Any) -> dict[str, Any]:
    model = mlp()
    return fit(run, model, sgd(model), run.own([list(batches()), []]))


def own_endless(run: Any) -> dict[str, Any]:
    model = mlp()
    return fit(run, model, sgd(model), run.own([itertools.cycle(batches())] * WORKERS))


def unfollowed(run: Any) -> dict[str, Any]:
    model = mlp()
    optimizer = sgd(model)
    LambdaLR(optimizer, lambda step: 0.7**step)
    return fit(run, model, optimizer, [])


def two_models(run: Any) -> dict[str, Any]:
    for model in (mlp(), mlp()):
        run.distribute(model, sgd(model))
    return {}


def two_runs(run: Any) -> dict[str, Any]:
    weft.init()
    return {}


TOPK = "bsp / direct / error_feedback(topk(ratio=0.5)) / fused(bucket=256B)"
REFUSED: list[tuple[Any, int, int, str, str, str]] = [
    # loop, processes, workers, strategy, kind, remedy
    (twice, 2, 2, TOPK, "LoopError", r"with run\.accumulate\(\)"),
    (twice, 2, 2, "bsp / direct / cast", "LoopError", r"with run\.accumulate\(\)"),
    (every_second, 2, 2, TOPK, "LoopError", r"with run\.accumulate\(\)"),
    (apart, 2, 2, TOPK, "LoopError", r"with run\.accumulate\(\)"),
    (twice, 1, 4, DENSE, "LoopError", r"with run\.accumulate\(\)"),
    (kept, 1, 4, DENSE, "LoopError", r"call optimizer\.zero_grad\(\)"),
    (uneven_micro, 4, 4, DENSE, "LoopError", "drop_last=True"),
    (uneven_micro, 1, 4, DENSE, "LoopError", "drop_last=True"),
    (uneven_micro_within, 4, 4, DENSE, "LoopError", "drop_last=True"),
    (uneven_micro_within, 1, 4, DENSE, "LoopError", "drop_last=True"),
    (own_micro, 4, 4, DENSE, "LoopError", "as many batches"),
    (leftover, 1, 4, DENSE, "LoopError", "let an epoch consist of whole steps"),
    (never_exchanged, 2, 2, DENSE, "LoopError", "leave the last backward outside"),
    (never_exchanged, 1, 2, DENSE, "LoopError", "leave the last backward outside"),
    (vanishing, 4, 4, DENSE, "LoopError", r"branch\.(weight|bias) .* unused=True"),
    (vanishing, 1, 4, DENSE, "LoopError", r"branch\.(weight|bias) .* unused=True"),
    (sparse, 2, 2, DENSE, "LoopError", "weight has a sparse gradient.*sparse=False"),
    (foreign, 2, 2, DENSE, "UserError", r"one nn\.Module"),
    (all_frozen, 2, 2, DENSE, "UserError", "unfreeze"),
    (thawed, 2, 2, DENSE, "LoopError", r"0\.(weight|bias) was frozen .* unfreeze it before"),
    (closure, 2, 2, DENSE, "LoopError", "evaluated its closure twice"),
    (second_order, 2, 2, DENSE, "LoopError", r"torch\.autograd\.grad"),
    (sampled, 2, 2, DENSE, "UserError", "own=True"),
    (synced_norm, 2, 2, DENSE, "UserError", "use BatchNorm"),
    (empty, 2, 2, DENSE, "LoopError", "drop_last=False"),
    (own, 2, 4, DENSE, "UserError", "use one per worker"),
    (own_empty, 2, 2, DENSE, "UserError", "worker 1 has no batch.* give every worker"),
    (own_endless, 2, 2, DENSE, "UserError", r"len\(\) works"),
    (unfollowed, 1, 4, DENSE, "UserError", r"run\.distribute\(model, optimizer, scheduler\)"),
    (two_models, 2, 2, DENSE, "UserError", r"nn\.ModuleDict"),
    (two_runs, 2, 2, DENSE, "LoopError", r"close\(\) it first"),
]


@pytest.mark.parametrize(
    ("loop", "processes", "workers", "strategy", "kind", "remedy"),
    REFUSED,
    ids=[f"{loop.__name__}-{workers}-on-{processes}-{at}" for at, (loop, processes, workers, *_) in enumerate(REFUSED)],
)
def test_refused_with_a_remedy(loop: Any, processes: int, workers: int, strategy: str, kind: str, remedy: str) -> None:
    with pytest.raises(ChildError, match=rf"weft\.errors\.{kind}: .*{remedy}") as caught:
        spawn(processes, child, loop, [strategy], workers=workers)
    assert caught.value.kind == kind


def test_a_step_for_every_second_batch_is_refused_where_workers_share_a_process() -> None:
    with pytest.raises(ChildError, match=r"LoopError: .*accumulate\(\)"):
        spawn(1, child, every_second, [DENSE], workers=WORKERS)
