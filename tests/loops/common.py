"""The parts that training loops share, and the table in which they enter themselves.

A loop takes a ground, plain PyTorch or a weft run, and returns tensors that have to be the same on both. Sizes are
small and numbers are float64, so that one wrong gradient shows. Left out, because they are local by definition, as
under DistributedDataParallel: batch normalization, a buffer that forward changes in place, and hooks that clamp a
gradient before it is averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.loops.ground import Ground

INPUTS, OUTPUTS, BATCH = 6, 3, 3
State = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]
ENTERED: dict[str, Callable[[Ground], State]] = {}
TOLERANCES = {"bf16": 0.05, "mixed_dtypes": 0.05, "autocast_scaler": 0.02}
"""Relative to the largest element, where it is more than 1e-9: these loops round to few bits, in another order."""


def loop(function: Callable[[Ground], State]) -> Callable[[Ground], State]:
    """Add a loop to the table."""
    ENTERED[function.__name__] = function
    return function


def seed() -> None:
    """Start the global generator afresh, for weights that are the same everywhere."""
    torch.manual_seed(11)


def generator(number: int) -> torch.Generator:
    """A random stream of its own."""
    return torch.Generator().manual_seed(number)


def data(steps: int, workers: int, extra: int = 0) -> TensorDataset:
    """Pairs for so many joined batches, and some more."""
    count, stream = steps * workers * BATCH + extra, generator(5)
    return TensorDataset(torch.randn(count, INPUTS, generator=stream), torch.randn(count, OUTPUTS, generator=stream))


def loader(ground: Ground, steps: int = 6, extra: int = 0) -> DataLoader[Any]:
    """The plain loader over `data`."""
    return DataLoader(data(steps, ground.workers, extra), batch_size=BATCH)


def batches_of(sizes: Iterable[int]) -> list[Batch]:
    """A list of batches with these sizes."""
    stream = generator(2)
    return [
        (torch.randn(size, INPUTS, generator=stream), torch.randn(size, OUTPUTS, generator=stream)) for size in sizes
    ]


def mse(output: Tensor, target: Tensor) -> Tensor:
    """The mean of squares."""
    return ((output - target) ** 2).mean()


def state(model: nn.Module, **more: Tensor) -> State:
    """A copy of the model's state, with further tensors."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()} | more


class MLP(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        seed()
        self.a, self.b, self.c = nn.Linear(INPUTS, 7), nn.Linear(7, 7), nn.Linear(7, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    """SGD with momentum and weight decay, unless told otherwise."""
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01} | options)


def begin(ground: Ground, **options: Any) -> tuple[Any, Any]:
    """An MLP and its SGD, distributed."""
    model = MLP()
    return ground.distribute(model, sgd(model, **options))


def update(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, loss: Callable[..., Tensor] = mse) -> None:
    """The usual three lines."""
    loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def fit(
    ground: Ground,
    model: nn.Module,
    optimizer: Any,
    *,
    batches: Iterable[Any] | None = None,
    loss: Callable[..., Tensor] = mse,
    **options: Any,
) -> State:
    """The plainest loop: distribute, and update on every batch."""
    model, optimizer = ground.distribute(model, optimizer, **options)
    for x, y in ground.shard(loader(ground) if batches is None else batches):
        update(model, optimizer, x, y, loss)
    return state(model)
