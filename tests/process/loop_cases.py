"""Training loops, each of which runs on either ground: optimizers, clipping, accumulation, unused and tied weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.process.loop_grounds import STEPS, WORKERS, batches, dataset, fit, mlp, mse, sgd, state_of


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
