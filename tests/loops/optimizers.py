"""Training loops as people write them: optimizers and schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.loops.common import (
    INPUTS,
    MLP,
    OUTPUTS,
    Batch,
    State,
    begin,
    fit,
    loader,
    loop,
    mse,
    seed,
    sgd,
    state,
    update,
)
from tests.loops.ground import Ground


@loop
def groups(ground: Ground) -> State:
    """Parameter groups with settings of their own."""
    model = MLP()
    parts = [
        {"params": model.a.parameters(), "lr": 0.02},
        {"params": model.b.parameters(), "weight_decay": 0.3, "nesterov": True},
        {"params": model.c.parameters()},
    ]
    return fit(ground, model, torch.optim.SGD(parts, lr=0.1, momentum=0.9))


@loop
def add_group(ground: Ground) -> State:
    """A layer that joins the optimizer after distribute."""
    model: Any = MLP()
    optimizer: Any = torch.optim.SGD([*model.a.parameters(), *model.c.parameters()], lr=0.1, momentum=0.9)
    model, optimizer = ground.distribute(model, optimizer)
    for index, (x, y) in enumerate(ground.shard(loader(ground, 8))):
        if ground.step_of(index) == 3 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(model.b.parameters()), "lr": 0.05})
        mse(model(x), y).backward()
        optimizer.step()
        model.zero_grad()
        optimizer.zero_grad()
    return state(model)


@loop
def adam_amsgrad(ground: Ground) -> State:
    """Adam with AMSGrad and weight decay."""
    model = MLP()
    return fit(ground, model, torch.optim.Adam(model.parameters(), lr=0.02, amsgrad=True, weight_decay=0.1))


@loop
def adam_foreach(ground: Ground) -> State:
    """Adam over lists of tensors."""
    model = MLP()
    return fit(ground, model, torch.optim.Adam(model.parameters(), lr=0.02, foreach=True))


@loop
def adam_fused(ground: Ground) -> State:
    """AdamW as one kernel."""
    model = MLP()
    return fit(ground, model, torch.optim.AdamW(model.parameters(), lr=0.02, fused=True))


def fit_scheduled(ground: Ground, optimizer: Any, scheduler: Any, model: nn.Module, steps: int = 6) -> State:
    """A scheduler that steps with the optimizer."""
    model, optimizer, scheduler = ground.distribute(model, optimizer, scheduler)
    for x, y in ground.shard(loader(ground, steps)):
        mse(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return state(model)


@loop
def adam_tensor_lr(ground: Ground) -> State:
    """A learning rate that is a tensor, changed in place by a scheduler."""
    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.02))
    return fit_scheduled(ground, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5), model)


@loop
def sgd_nesterov(ground: Ground) -> State:
    """SGD with Nesterov's momentum."""
    model = MLP()
    return fit(ground, model, sgd(model, nesterov=True))


@loop
def rprop(ground: Ground) -> State:
    """Rprop, which goes by the signs."""
    model = MLP()
    return fit(ground, model, torch.optim.Rprop(model.parameters(), lr=0.01))


@loop
def adafactor(ground: Ground) -> State:
    """Adafactor, whose state is factored."""
    model = MLP()
    return fit(ground, model, torch.optim.Adafactor(model.parameters(), lr=0.05))


@loop
def asgd(ground: Ground) -> State:
    """Averaged SGD."""
    model = MLP()
    return fit(ground, model, torch.optim.ASGD(model.parameters(), lr=0.05, t0=2))


@loop
def muonish(ground: Ground) -> State:
    """Muon, which takes a matrix as a whole."""
    model = nn.Sequential(nn.Linear(INPUTS, 7, bias=False), nn.Tanh(), nn.Linear(7, OUTPUTS, bias=False))
    seed()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return fit(ground, model, torch.optim.Muon(model.parameters(), lr=0.05))


@loop
def lbfgs(ground: Ground) -> State:
    """L-BFGS, which calls a closure several times a step."""
    model: Any = MLP()
    model, optimizer = ground.distribute(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    for batch in ground.shard(loader(ground)):

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            loss = mse(model(batch[0]), batch[1])
            loss.backward()
            return loss

        optimizer.step(closure)
    return state(model)


@loop
def sched_epoch(ground: Ground) -> State:
    """A scheduler that steps once an epoch."""
    model: Any = MLP()
    optimizer: Any = sgd(model)
    model, optimizer, scheduler = ground.distribute(model, optimizer, lr_scheduler.StepLR(optimizer, 1, 0.5))
    for _ in range(3):
        for x, y in ground.shard(loader(ground, 3)):
            update(model, optimizer, x, y)
        scheduler.step()
    return state(model)


@loop
def sched_onecycle(ground: Ground) -> State:
    """One cycle of learning rate and momentum."""
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return fit_scheduled(ground, optimizer, lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20), model, 9)


@loop
def lr_int(ground: Ground) -> State:
    """A schedule whose numbers are whole."""
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=1, weight_decay=0.1)
    return fit_scheduled(ground, optimizer, lr_scheduler.LambdaLR(optimizer, lambda t: 1 if t < 2 else 0), model)


@loop
def lr_by_hand(ground: Ground) -> State:
    """Settings assigned before each step, whole numbers among them."""
    model, optimizer = begin(ground, lr=0.2, weight_decay=0.05)
    for index, (x, y) in enumerate(ground.shard(loader(ground))):
        step = ground.step_of(index)
        for group in optimizer.param_groups:
            group["lr"] = 0.2 if step < 2 else 0
            group["momentum"] = 0.9 if step < 1 else 0
            group["weight_decay"] = 0.05
        update(model, optimizer, x, y)
    return state(model)


@loop
def lr_decay_by_hand(ground: Ground) -> State:
    """The learning rate is multiplied after each step."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        update(model, optimizer, x, y)
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
    return state(model)


@loop
def two_opts(ground: Ground) -> State:
    """Two optimizers for two parts; the second is passed along."""
    model: Any = MLP()
    first: Any = torch.optim.SGD([*model.a.parameters(), *model.b.parameters()], lr=0.1, momentum=0.9)
    model, first, second = ground.distribute(model, first, torch.optim.Adam(model.c.parameters(), lr=0.02))
    for x, y in ground.shard(loader(ground)):
        mse(model(x), y).backward()
        first.step()
        first.zero_grad()
        second.step()
        second.zero_grad()
    return state(model)


@loop
def gan(ground: Ground) -> State:
    """Generator and discriminator by turns, with a loss and an optimizer each."""
    seed()
    model: Any = nn.ModuleDict({"g": nn.Linear(INPUTS, OUTPUTS), "d": nn.Linear(OUTPUTS, 1)})
    makers: Any = torch.optim.SGD(model["g"].parameters(), lr=0.05, momentum=0.5)
    judges: Any = torch.optim.SGD(model["d"].parameters(), lr=0.05, momentum=0.5)
    model, makers, judges = ground.distribute(model, makers, judges, unused=True)
    for x, y in ground.shard(loader(ground)):
        judges.zero_grad()
        fake, real = model["d"](model["g"](x).detach()), model["d"](y)
        (fake.mean() - real.mean() + 0.1 * (model["d"](y) ** 2).mean()).backward()
        judges.step()
        makers.zero_grad()
        (-model["d"](model["g"](x)).mean() + 0.1 * (model["g"](x) ** 2).mean()).backward()
        makers.step()
    return state(model)


@loop
def momentum_reset(ground: Ground) -> State:
    """Momentum is set to zero in the middle."""
    model, optimizer = begin(ground)
    for index, (x, y) in enumerate(ground.shard(loader(ground))):
        update(model, optimizer, x, y)
        if ground.step_of(index) == 2:
            for parameter in model.parameters():
                if "momentum_buffer" in optimizer.state[parameter]:
                    optimizer.state[parameter]["momentum_buffer"].zero_()
    return state(model)


@loop
def state_clear(ground: Ground) -> State:
    """Adam forgets its moments in the middle."""
    model: Any = MLP()
    model, optimizer = ground.distribute(model, torch.optim.Adam(model.parameters(), lr=0.02))
    for index, (x, y) in enumerate(ground.shard(loader(ground))):
        update(model, optimizer, x, y)
        if ground.step_of(index) == 2:
            optimizer.state.clear()
    return state(model)


def clip(optimizer: Any, *_: Any) -> None:
    """A hook on the optimizer's step that clips the gradients' norm."""
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)


@loop
def pre_hook_clip(ground: Ground) -> State:
    """Clipping as a hook on the step, registered before distribute."""
    model = MLP()
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(clip)
    return fit(ground, model, optimizer)


@loop
def pre_hook_late(ground: Ground) -> State:
    """Clipping as a hook on the step, registered after distribute."""
    model, optimizer = begin(ground)
    optimizer.register_step_pre_hook(clip)
    for x, y in ground.shard(loader(ground)):
        update(model, optimizer, x, y)
    return state(model)


@loop
def step_twice(ground: Ground) -> State:
    """Two steps with one gradient."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        mse(model(x), y).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def skip_step(ground: Ground) -> State:
    """Gradients thrown away in some steps."""
    model, optimizer = begin(ground)
    for index, (x, y) in enumerate(ground.shard(loader(ground, 8))):
        mse(model(x), y).backward()
        if ground.step_of(index) % 3 != 1:
            optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def zero_first(ground: Ground) -> State:
    """zero_grad to zeros, before forward."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        optimizer.zero_grad(set_to_none=False)
        mse(model(x), y).backward()
        optimizer.step()
    return state(model)


@loop
def zero_model(ground: Ground) -> State:
    """zero_grad of the model."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        model.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    return state(model)


@loop
def zero_between(ground: Ground) -> State:
    """zero_grad between forward and backward."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return state(model)
