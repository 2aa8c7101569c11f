"""The two grounds of a training loop, plain PyTorch on the joined batch and a run of weft, and small models and data.

Batch t of the joined loader is batches 4t .. 4t+3 of the loader.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.runtime.engine import calibration

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
DENSE = SCHEDULES["fused"]
Batch = tuple[Tensor, Tensor]
Trained = tuple[dict[str, Any], list[float]]
"""What a loop leaves: the model's state with whatever else it returns, and the loss of every joined batch."""


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
