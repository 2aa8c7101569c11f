"""The matrix: every schedule with everything that a training loop may do, on four workers in float64.

The outcome equals one plain PyTorch process on the joined batch (batch t of it is batches 4t .. 4t+3 of the loader)
to 1e-10, or it is a refusal with a remedy. There is no third one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import weft
from tests.process.harness import ChildError, spawn
from weft.runtime.engine import calibration as calibration

WORKERS = 4
STEPS = 6
SCHEDULES = {
    "sequential": "bsp / direct / sequential",
    "wfbp": "bsp / direct / wfbp",
    "fused": "bsp / direct / fused(bucket=256B, first=128B, alone=400B)",
    "ring": "bsp / ring / fused(bucket=256B, first=128B, alone=400B)",
    "mg_wfbp": "bsp / direct / mg_wfbp",
    "priority": "bsp / direct / priority(partition=128B, credit=300B, least=64B)",
    "ring, priority": "bsp / ring / priority(partition=1KiB)",
}
"""Small enough for several buckets, some of one parameter and some of several."""

Batch = tuple[Tensor, Tensor]
Trained = tuple[dict[str, Any], list[float]]
"""What a loop leaves: the model's state with whatever else it returns, and the loss of every joined batch."""


# --- one loop, two grounds ------------------------------------------------------------------------------------------


class Plain:
    """What a loop asks of a run, in one process without weft: joined batches, and PyTorch's own for the rest."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def distribute(self, model: nn.Module, *others: Any, unused: bool = False) -> Any:
        self.model = model
        return (model, *others)

    def shard(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        source = iter(loader)
        while group := list(itertools.islice(source, WORKERS)):
            if len(group) == WORKERS or not getattr(loader, "drop_last", False):
                yield joined(group)

    def own(self, loaders: Sequence[Iterable[Batch]]) -> Iterator[Batch]:
        for group in itertools.zip_longest(*loaders):
            yield joined([batch for batch in group if batch is not None])

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def clip(self, norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def log(self, loss: Tensor) -> None:
        self.losses.append(loss.item())


class Told:
    """A run that remembers which worker logged which losses, and over how many samples."""

    def __init__(self, run: weft.Run) -> None:
        self.run = run
        self.losses: dict[int, list[float]] = {}
        self.clip, self.accumulate, self.distribute = run.clip, run.accumulate, run.distribute

    def shard(self, loader: Iterable[Batch], **how: Any) -> Iterator[Batch]:
        for batch in self.run.shard(loader, **how):
            self.rank = self.run.rank
            yield batch

    def own(self, loaders: Sequence[Iterable[Batch]]) -> Iterator[Batch]:
        return self.shard(loaders[self.run.rank], own=True)

    def log(self, loss: Tensor) -> None:
        self.run.log(loss=loss)
        self.losses.setdefault(self.rank, []).append(loss.item())


def joined(group: Sequence[Batch]) -> Batch:
    return torch.cat([x for x, _ in group]), torch.cat([y for _, y in group])


def child(loop: Callable[[Any], dict[str, Any]], strategies: Sequence[str]) -> list[Any]:
    """One run after another, each with a rendezvous of its own."""
    store, outcomes = os.environ["WEFT_STORE"], []
    for strategy in strategies:
        os.environ["WEFT_STORE"] = f"{store}-{len(outcomes)}"
        calibration.STEPS = 0  # schedules that learn from the first steps go by what the very first one shows
        run = Told(weft.init(strategy))
        outcomes.append((loop(run), run.losses))
        run.run.close()
    return outcomes


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


# --- models and data ------------------------------------------------------------------------------------------------


def mlp(*, width: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    return nn.Sequential(*layers).double()


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.05)


def dataset(count: int = 3 * WORKERS * STEPS) -> TensorDataset:
    rng = torch.Generator().manual_seed(7)
    x = torch.randn(count, 6, generator=rng, dtype=torch.float64)
    y = torch.randn(count, 3, generator=rng, dtype=torch.float64)
    return TensorDataset(x, y)


def batches(count: int = 3 * WORKERS * STEPS) -> DataLoader[Any]:
    return DataLoader(dataset(count), batch_size=3)


def even_sizes() -> list[list[int]]:
    return [[3] * WORKERS] * STEPS


def mse(out: Tensor, y: Tensor) -> Tensor:
    return ((out - y) ** 2).mean()


def state_of(model: nn.Module, **more: Any) -> dict[str, Any]:
    return {key: value.clone() for key, value in model.state_dict().items()} | more


# --- the loops: each is an ordinary PyTorch loop that runs on either ground -----------------------------------------


def fit(
    run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, feed: Iterable[Batch], unused: bool = False
) -> dict[str, Any]:
    """The plainest loop."""
    model, optimizer = run.distribute(model, optimizer, unused=unused)
    for x, y in feed:
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model)


def plain(run: Any) -> dict[str, Any]:
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": [*model[2].parameters()], "weight_decay": 0.3}]
    optimizer = torch.optim.SGD([*groups, {"params": model[4].parameters()}], lr=0.1, momentum=0.9)
    return fit(run, model, optimizer, run.shard(batches()))


def adamw(run: Any) -> dict[str, Any]:
    model = mlp()
    model, optimizer = run.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))
    for x, y in run.shard(batches()):
        optimizer.zero_grad(set_to_none=False)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    return state_of(model)


def clip(run: Any) -> dict[str, Any]:
    model = mlp()
    model, optimizer = run.distribute(model, sgd(model))
    norms = []
    for x, y in run.shard(batches()):
        loss = mse(model(x), y)
        loss.backward()
        norms.append(run.clip(0.1))
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model, norms=torch.stack(norms[len(norms) // STEPS - 1 :: len(norms) // STEPS]))


def clip_by_torch(run: Any) -> dict[str, Any]:
    model = mlp()
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.shard(batches()):
        loss = mse(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model)


def accumulate(run: Any) -> dict[str, Any]:
    """Two steps of three micro-batches each."""
    model = mlp()
    model, optimizer = run.distribute(model, sgd(model))
    for i, (x, y) in enumerate(run.shard(batches())):
        loss = mse(model(x), y)
        if i % 3 < 2:
            with run.accumulate():
                (loss / 3).backward()
        else:
            (loss / 3).backward()
            run.clip(0.5)
            optimizer.step()
            optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model)


def scaler(run: Any) -> dict[str, Any]:
    """At the third step one sample's gradient overflows; whoever has it, everyone skips, and the scale halves."""
    model = mlp()
    grow = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model, optimizer, grow = run.distribute(model, sgd(model), grow)
    data = dataset()
    data.tensors[1][2 * 3 * WORKERS + 3 + 1] = 1e308  # the second worker's batch at the third step
    for x, y in run.shard(DataLoader(data, batch_size=3)):
        loss = mse(model(x), y)
        grow.scale(loss).backward()
        grow.step(optimizer)
        grow.update()
        optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model, scale=grow.get_scale())


def frozen(run: Any) -> dict[str, Any]:
    """The frozen part is in the optimizer too, with weight decay and momentum, and must not move."""
    model = mlp()
    model[2].requires_grad_(False)
    state = fit(run, model, sgd(model), run.shard(batches()))
    assert all(p.grad is None for p in model[2].parameters())
    return state


class Branches(nn.Module):
    """A branch for some samples, left out where a batch has none of them; and one that nobody ever takes."""

    def __init__(self, *, spare: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk, self.branch, self.head = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 3)
        self.spare = nn.Linear(5, 5) if spare else None
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x).tanh()
        taken = x[:, :1] > BRANCH
        if taken.any():
            hidden = hidden + taken * self.branch(x)
        return self.head(hidden)


BRANCH = 2.5


def branched(takers: Iterable[tuple[int, int]], count: int = 3 * WORKERS * STEPS) -> DataLoader[Any]:
    """Batches of which those of these (step, worker) have one sample that takes the branch."""
    data = dataset(count)
    x = data.tensors[0]
    x[:, 0].clamp_(max=1.0)
    for step, worker in takers:
        x[(step * WORKERS + worker) * 3 + 1, 0] = 2 * BRANCH
    return DataLoader(data, batch_size=3)


def unused(run: Any) -> dict[str, Any]:
    """The branch: everyone, two workers, one, nobody twice (so that momentum and decay could move it), everyone."""
    takers = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 3), (2, 2), *((5, r) for r in range(WORKERS))]
    model = Branches()
    model, optimizer = run.distribute(model, sgd(model), unused=True)
    none = []
    for x, y in run.shard(branched(takers)):
        loss = mse(model(x), y)
        loss.backward()
        with torch._C.DisableTorchFunctionSubclass():  # a parameter between two workers' turns is not to be used
            none.append(model.branch.weight.grad is None)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    assert all(p.grad is None for p in model.spare.parameters())
    return state_of(model, none=none[len(none) // STEPS - 1 :: len(none) // STEPS])


def unused_unsaid(run: Any) -> dict[str, Any]:
    """The first step shows that parameters are left out, so later ones may be too, without unused=True."""
    model = Branches()
    return fit(run, model, sgd(model), run.shard(branched([(1, 0), (1, 3), (2, 2), (4, 1)])))


def unused_zeroed(run: Any) -> dict[str, Any]:
    """Gradients set to zero, not None: PyTorch then decays a parameter that has had one, and not one without."""
    model = Branches()
    model, optimizer = run.distribute(model, sgd(model), unused=True)
    for x, y in run.shard(branched([(1, 0), (1, 3), (4, 1)])):
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        run.log(loss=loss)
    return state_of(model)


def unused_accumulated(run: Any) -> dict[str, Any]:
    """The branch is taken inside accumulate() alone, or in the last micro-batch alone, or nowhere."""
    model = Branches()
    model, optimizer = run.distribute(model, sgd(model), unused=True)
    for i, (x, y) in enumerate(run.shard(branched([(0, 1), (2, 0), (2, 2), (3, 3)]))):
        loss = mse(model(x), y)
        with run.accumulate() if i % 2 == 0 else contextlib.nullcontext():
            (loss / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model)


class Tied(nn.Module):
    """One matrix used three times, and one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into, self.mix, self.out = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.mix.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mix(self.into(x).tanh()).tanh()
        return self.out(self.again(self.mix(hidden).tanh()))


def shared(run: Any) -> dict[str, Any]:
    model = Tied()
    state = fit(run, model, sgd(model), run.shard(batches()))
    assert model.again.weight is model.mix.weight
    return state


def one_cycle(run: Any) -> dict[str, Any]:
    model = mlp()
    optimizer = sgd(model)
    cycle = OneCycleLR(optimizer, max_lr=0.3, total_steps=STEPS)
    model, optimizer, cycle = run.distribute(model, optimizer, cycle)
    for x, y in run.shard(batches()):
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        if cycle.last_epoch < STEPS - 1:
            cycle.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model, lr=cycle.get_last_lr(), momentum=optimizer.param_groups[0]["momentum"])


def lambda_lr(run: Any) -> dict[str, Any]:
    model = mlp()
    optimizer = sgd(model, lr=0.2)
    decay = LambdaLR(optimizer, lambda step: 0.7**step)
    model, optimizer, decay = run.distribute(model, optimizer, decay)
    for x, y in run.shard(batches()):
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model, lr=decay.get_last_lr())


def everything(run: Any) -> dict[str, Any]:
    """Micro-batches, a scaler, clipping, a scheduler, groups, a branch, a frozen part and tied weights at once."""
    model = nn.ModuleDict({"first": Branches(), "second": Tied()})
    model["second"].into.requires_grad_(False)
    groups = [{"params": model["first"].parameters()}, {"params": model["second"].parameters(), "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)
    grow, decay = torch.amp.GradScaler("cpu", init_scale=64.0), LambdaLR(optimizer, lambda step: 0.8**step)
    model, optimizer, decay, grow = run.distribute(model, optimizer, decay, grow, unused=True)
    for i, (x, y) in enumerate(run.shard(branched([(0, 0), (2, 1), (3, 2), (5, 0)]))):
        loss = mse(model["first"](x) + model["second"](x), y)
        with run.accumulate() if i % 2 == 0 else contextlib.nullcontext():
            grow.scale(loss / 2).backward()
        if i % 2:
            grow.unscale_(optimizer)
            run.clip(0.05)
            grow.step(optimizer)
            grow.update()
            decay.step()
            optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model)


def uneven(run: Any) -> dict[str, Any]:
    """22 batches, the last of one sample: at the last step two workers have no batch, and one a short one."""
    model = mlp()
    return fit(run, model, sgd(model), run.shard(batches(64)))


def uneven_sizes() -> list[list[int]]:
    return [[3] * WORKERS] * 5 + [[3, 1, 0, 0]]


def uneven_list(run: Any) -> dict[str, Any]:
    """Any iterable of batches, of any sizes."""
    model = mlp()
    data = dataset().tensors
    cuts = list(itertools.accumulate(itertools.chain.from_iterable(LIST_SIZES)))
    loader = [(data[0][b - n : b], data[1][b - n : b]) for b, n in zip(cuts, itertools.chain(*LIST_SIZES), strict=True)]
    return fit(run, model, sgd(model), run.shard(batch for batch in loader if len(batch[0])))


LIST_SIZES = [[1, 2, 3, 4], [5, 1, 1, 1], [2, 2, 2, 2], [4, 3, 2, 1], [1, 0, 0, 0]]


def own(run: Any) -> dict[str, Any]:
    """Everyone brings loaders of their own length; worker 0 is the first to run out."""
    model = mlp()
    return fit(run, model, sgd(model), run.own(own_loaders()))


def own_loaders(takers: Sequence[int] = ()) -> list[DataLoader[Any]]:
    """2, 5, 3 and 6 batches, most with a short last one."""
    x, y = dataset().tensors
    x[:, 0].clamp_(max=1.0)
    x[list(takers), 0] = 2 * BRANCH
    ends = [0, 5, 20, 28, 44]
    return [DataLoader(TensorDataset(x[a:b], y[a:b]), batch_size=3) for a, b in itertools.pairwise(ends)]


def own_sizes() -> list[list[int]]:
    sizes = [[len(x) for x, _ in loader] for loader in own_loaders()]
    return [list(row) for row in itertools.zip_longest(*sizes, fillvalue=0)]


def own_list(run: Any) -> dict[str, Any]:
    """The same batches from loaders that do not know their sizes ahead."""
    model = mlp()
    return fit(run, model, sgd(model), run.own([list(loader) for loader in own_loaders()]))


def own_overflow(run: Any) -> dict[str, Any]:
    """Worker 0's last batch overflows and all skip; what it computes later, without a batch, must not count."""
    model = mlp()
    grow = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model, optimizer, grow = run.distribute(model, sgd(model), grow)
    loaders = own_loaders()
    loaders[0].dataset.tensors[1][-1] = 1e308
    for x, y in run.own(loaders):
        loss = mse(model(x), y)
        grow.scale(loss).backward()
        grow.step(optimizer)
        grow.update()
        optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model, scale=grow.get_scale())


def own_unused(run: Any) -> dict[str, Any]:
    """Worker 0's last batch takes the branch; worker 0 without a batch must not count as taking it again."""
    model = Branches()
    return fit(run, model, sgd(model), run.own(own_loaders(takers=[1, 4])), unused=True)


def twice(run: Any) -> dict[str, Any]:
    """Two losses, two backwards before a step, the second through a part of the model only."""
    model = mlp()
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.shard(batches()):
        loss = mse(model(x), y)
        loss.backward()
        (0.1 * model[4](model[3](model[2](x[:, :1].expand(-1, 8)))).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model)


def every_second(run: Any) -> dict[str, Any]:
    """A step for every second batch, without accumulate(): exchanged twice, and right where nothing is left out."""
    model = mlp()
    model, optimizer = run.distribute(model, sgd(model))
    for i, (x, y) in enumerate(run.shard(batches())):
        loss = mse(model(x), y)
        (loss / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model)


def kept(run: Any) -> dict[str, Any]:
    """Without zero_grad gradients add up from step to step, as they do in PyTorch."""
    model = mlp()
    model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.02))
    for x, y in run.shard(batches()):
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
    return state_of(model)


def workers_of_a_loader(run: Any) -> dict[str, Any]:
    """A DataLoader with processes of its own, shuffled by the user's generator."""
    model = mlp()
    rng = torch.Generator().manual_seed(11)
    return fit(
        run,
        model,
        sgd(model),
        run.shard(DataLoader(dataset(), batch_size=3, shuffle=True, num_workers=2, generator=rng, **FORK)),
    )


FORK: dict[str, Any] = {"multiprocessing_context": "fork"}  # Linux's default, which a fork server's children lack


class Ready(torch.utils.data.Dataset[Batch]):
    """A dataset of whole batches."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Batch:
        x, y = dataset(64).tensors
        return x[index * 3 : index * 3 + 3], y[index * 3 : index * 3 + 3]


def batched_dataset(run: Any) -> dict[str, Any]:
    model = mlp()
    return fit(run, model, sgd(model), run.shard(DataLoader(Ready(), batch_size=None)))


class Stream(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        return iter(dataset(64))


def dropped(run: Any) -> dict[str, Any]:
    """22 batches and one dropped sample: drop_last also drops the two batches that make no whole step."""
    model = mlp()
    return fit(run, model, sgd(model), run.shard(DataLoader(dataset(67), batch_size=3, drop_last=True)))


def streamed(run: Any) -> dict[str, Any]:
    model = mlp()
    return fit(run, model, sgd(model), run.shard(DataLoader(Stream(), batch_size=3)))


class Image(nn.Module):
    """Convolutions whose weights and gradients lie in memory by another order than their dimensions'."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.one, self.two, self.head = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 4, (1, 2)), nn.Linear(4, 3)
        self.double().to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 2, 1, 3).expand(-1, -1, 3, -1).contiguous(memory_format=torch.channels_last)
        return self.head(self.two(self.one(image).tanh()).mean((2, 3)))


def channels_last(run: Any) -> dict[str, Any]:
    model = Image()
    assert not model.one.weight.is_contiguous()
    return fit(run, model, sgd(model), run.shard(batches()))


def checkpointed(run: Any) -> dict[str, Any]:
    model = mlp()
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.shard(batches()):
        loss = mse(model[4](checkpoint(model[:4], x, use_reentrant=False)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model)


# --- BatchNorm: every worker normalises by its own batch, and the running statistics are worker 0's -----------------


def normed() -> nn.Sequential:
    torch.manual_seed(4)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def batchnorm(run: Any) -> dict[str, Any]:
    model = normed()
    return fit(run, model, sgd(model), run.shard(batches()))


def batchnorm_accumulated(run: Any) -> dict[str, Any]:
    model = normed()
    model, optimizer = run.distribute(model, sgd(model))
    for i, (x, y) in enumerate(run.shard(batches())):
        loss = mse(model(x), y)
        with run.accumulate() if i % 3 < 2 else contextlib.nullcontext():
            (loss / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model)


def batchnorm_own(run: Any) -> dict[str, Any]:
    """Worker 0 runs out of batches: from there on the running statistics stay as they are."""
    model = normed()
    return fit(run, model, sgd(model), run.own(normed_loaders()))


def normed_loaders() -> list[DataLoader[Any]]:
    x, y = dataset().tensors
    ends = [0, 8, 20, 28, 45]
    return [DataLoader(TensorDataset(x[a:b], y[a:b]), batch_size=3) for a, b in itertools.pairwise(ends)]


def normed_sizes() -> list[list[int]]:
    sizes = [[len(x) for x, _ in loader] for loader in normed_loaders()]
    return [list(row) for row in itertools.zip_longest(*sizes, fillvalue=0)]


def norm_by_hand(steps: Sequence[Sequence[Sequence[Batch | None]]]) -> Trained:
    """Each worker's micro-batches from the same buffers, gradients added by share, worker 0's buffers kept."""
    model = normed()
    optimizer = sgd(model)
    losses = []
    for micro in steps:
        start = [b.clone() for b in model.buffers()]
        sums = [0.0] * len(micro)
        samples = [sum(len(batch[0]) for batch in group if batch is not None) for group in micro]
        for worker in range(WORKERS):
            set_buffers(model, start)
            for at, group in enumerate(micro):
                if (batch := group[worker]) is not None:
                    share = len(batch[0]) / samples[at]
                    loss = mse(model(batch[0]), batch[1])
                    (loss * share / len(micro)).backward()
                    sums[at] += loss.item() * share
            if worker == 0:
                first = [b.clone() for b in model.buffers()]
        set_buffers(model, first)
        optimizer.step()
        optimizer.zero_grad()
        losses += sums
    return state_of(model), losses


def set_buffers(model: nn.Module, values: Sequence[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def batchnorm_by_hand() -> Trained:
    groups = grouped(list(batches()), WORKERS)
    return norm_by_hand([[group] for group in groups])


def batchnorm_accumulated_by_hand() -> Trained:
    return norm_by_hand(grouped(grouped(list(batches()), WORKERS), 3))


def batchnorm_own_by_hand() -> Trained:
    return norm_by_hand([[group] for group in itertools.zip_longest(*normed_loaders())])


def grouped(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


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


# --- equal ----------------------------------------------------------------------------------------------------------

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


# --- refused --------------------------------------------------------------------------------------------------------


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
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.shard(batches()):
        optimizer.step(lambda x=x, y=y: mse(model(x), y))
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
DENSE = SCHEDULES["fused"]
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
    (closure, 2, 2, DENSE, "LoopError", "call backward first"),
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


# --- dealing --------------------------------------------------------------------------------------------------------


class Shuffled(IterableDataset[Tensor]):
    """Draws its order from torch's global random numbers, as any loader may."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randperm(48))


def numbers(kind: str) -> Iterable[Tensor]:
    numbers: Any = torch.arange(48)
    match kind:
        case "shuffle":
            return DataLoader(numbers, batch_size=2, shuffle=True)
        case "generator":
            return DataLoader(numbers, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
        case "batch_sampler":
            sampler = torch.utils.data.RandomSampler(numbers)
            return DataLoader(numbers, batch_sampler=torch.utils.data.BatchSampler(sampler, 2, False))
        case "batch_size=None":
            return DataLoader(numbers, batch_size=None, shuffle=True)
        case "iterable":
            return DataLoader(Shuffled(), batch_size=2)
    raise AssertionError(kind)


KINDS = ("shuffle", "generator", "batch_sampler", "batch_size=None", "iterable")


def deal(kinds: Sequence[str]) -> list[list[dict[int, list[int]]]]:
    """For each kind of loader and each of three epochs (one, then two in one): what each worker was dealt."""
    store, rows = os.environ["WEFT_STORE"], []
    for at, kind in enumerate(kinds):
        os.environ["WEFT_STORE"] = f"{store}-{at}"
        run = weft.init(DENSE)
        model = nn.Linear(1, 1)
        model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader, dealt = numbers(kind), []
        for feed in (run.shard(loader), run.shard(loader, epochs=2)):
            for batch in feed:
                dealt.append((run.step, run.rank, batch.view(-1).tolist()))
                model(torch.rand(1, 1)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        per_epoch = run.step // 3
        epochs: list[dict[int, list[int]]] = [{} for _ in range(3)]
        for step, rank, items in dealt:
            epochs[step // per_epoch].setdefault(rank, []).extend(items)
        rows.append(epochs)
        run.close()
    return rows


def test_every_sample_is_dealt_once_per_epoch_and_epochs_differ() -> None:
    """However many processes there are, and wherever a loader takes its random numbers from."""
    outcomes = [spawn(processes, deal, KINDS, workers=WORKERS) for processes in (1, 3, 4)]
    for at, kind in enumerate(KINDS):
        shapes = []
        for rows in outcomes:
            shapes.append([{r: v for row in rows for r, v in row[at][e].items()} for e in range(3)])
            for epoch in shapes[-1]:
                assert sorted(epoch) == list(range(WORKERS))
                assert sorted(itertools.chain.from_iterable(epoch.values())) == list(range(48)), kind
        assert shapes[0] == shapes[1] == shapes[2], kind
        assert all(one != other for one, other in itertools.combinations(shapes[0], 2)), kind
