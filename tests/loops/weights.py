"""Training loops as people write them: weights between steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from tests.loops.common import INPUTS, MLP, OUTPUTS, State, begin, data, loader, loop, mse, seed, sgd, state, update
from tests.loops.ground import Ground


@loop
def ema_hand(ground: Ground) -> State:
    """A moving average of the weights, by hand."""
    model, optimizer = begin(ground)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for x, y in ground.shard(loader(ground)):
        update(model, optimizer, x, y)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                average[name].mul_(0.9).add_(parameter, alpha=0.1)
    return state(model, **{f"average.{name}": tensor for name, tensor in average.items()})


@loop
def ema_averaged(ground: Ground) -> State:
    """A moving average of the weights, by AveragedModel."""
    model: Any = MLP()
    average: Any = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    model, optimizer, average = ground.distribute(model, sgd(model), average)
    for x, y in ground.shard(loader(ground)):
        mse(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
        optimizer.zero_grad()
    return state(model, **{f"average.{name}": tensor for name, tensor in average.state_dict().items()})


@loop
def wgan_clip(ground: Ground) -> State:
    """Weights clamped after each step, through .data."""
    model, optimizer = begin(ground, lr=0.3, weight_decay=0.0)
    for x, y in ground.shard(loader(ground)):
        update(model, optimizer, x, y)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)
    return state(model)


@loop
def vec_to_params(ground: Ground) -> State:
    """Weights projected through one vector."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        update(model, optimizer, x, y)
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector / max(1.0, vector.norm() / 2), model.parameters())
    return state(model)


@loop
def data_replaced(ground: Ground) -> State:
    """Parameters get new storage after each step."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        update(model, optimizer, x, y)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return state(model)


@loop
def deep_copies(ground: Ground) -> State:
    """A deep copy of the model after each step, before zero_grad."""
    model, optimizer = begin(ground)
    copies = []
    for index, (x, y) in enumerate(ground.shard(loader(ground))):
        mse(model(x), y).backward()
        optimizer.step()
        copied = copy.deepcopy(model)
        if ground.ends_step(index):
            copies.append(copied)
        optimizer.zero_grad()
    return state(model, **{f"{k}.{name}": t for k, each in enumerate(copies) for name, t in state(each).items()})


@loop
def eval_inside(ground: Ground) -> State:
    """An evaluation in inference mode after each step."""
    seed()
    model: Any = nn.Sequential(nn.Linear(INPUTS, 7), nn.Dropout(0.0), nn.Tanh(), nn.Linear(7, OUTPUTS))
    model, optimizer = ground.distribute(model, sgd(model))
    inputs, targets = data(1, 4)[:]
    losses = []
    for index, (x, y) in enumerate(ground.shard(loader(ground))):
        model.train()
        update(model, optimizer, x, y)
        model.eval()
        with torch.inference_mode():
            loss = mse(model(inputs), targets).item()
        if ground.ends_step(index):
            losses.append(loss)
    return state(model, losses=torch.tensor(losses))
