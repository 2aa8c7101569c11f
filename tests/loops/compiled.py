"""Training loops as people write them: torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.loops.common import MLP, State, begin, fit, loader, loop, mse, sgd, state, update
from tests.loops.ground import Ground


@loop
def compile_model(ground: Ground) -> State:
    """A compiled model."""
    model = MLP()
    compiled: Any = model if ground.plain else torch.compile(model, backend="aot_eager")
    compiled, optimizer = ground.distribute(compiled, sgd(model))
    for x, y in ground.shard(loader(ground)):
        update(compiled, optimizer, x, y)
    return state(model)


@loop
def compile_inplace(ground: Ground) -> State:
    """A model compiled in place."""
    model = MLP()
    if not ground.plain:
        model.compile(backend="aot_eager")
    return fit(ground, model, sgd(model))


@loop
def compile_fn(ground: Ground) -> State:
    """A compiled function that calls the model."""
    model, optimizer = begin(ground)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return mse(model(x), y)

    compiled = loss if ground.plain else torch.compile(loss, backend="aot_eager")
    for x, y in ground.shard(loader(ground, 8)):
        compiled(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def compile_part(ground: Ground) -> State:
    """One compiled layer."""
    model: Any = MLP()
    if not ground.plain:
        model.b = torch.compile(model.b, backend="aot_eager")
    trained = fit(ground, model, sgd(model), batches=loader(ground, 8))
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in trained.items()}
