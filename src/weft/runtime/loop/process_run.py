"""The contract of a process in a run: `run.py` documents the methods, `WorkerRun` and `ServerRun` implement them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.runtime.launch.world import World
from weft.runtime.loop.epochs import Epochs
from weft.runtime.loop.evaluation import Evaluation
from weft.runtime.loop.reductions import Reductions
from weft.runtime.loop.sample_shares import Count
from weft.runtime.loop.shard import Shard
from weft.strategy import Strategy


class ProcessRun(Protocol):
    """One process's part in a run, to which `Run` delegates.

    In a server process, `distribute` does not return, and the methods for a worker's loop raise LoopError.
    """

    world: World
    strategy: Strategy
    steps: int | None
    seed: int
    device: torch.device
    folder: Path | None
    is_main: bool

    @property
    def rank(self) -> int: ...
    @property
    def passes(self) -> int: ...
    @property
    def step(self) -> int: ...
    def distribute(
        self, model: nn.Module, optimizer: Optimizer, *followers: Any, unused: bool, reduction: str
    ) -> Any: ...
    def shard(
        self, loader: Iterable[Any], *, epochs: int | None, own: bool, samples: Count | None, device: bool
    ) -> Shard: ...
    def epochs(self, count: int) -> Epochs: ...
    def evaluate(self, loader: Iterable[Any], *, device: bool) -> Evaluation: ...
    def merged(self) -> AbstractContextManager[None]: ...
    def reductions(self) -> Reductions: ...
    def log(self, **values: float | Tensor) -> None: ...
    def accumulate(self) -> AbstractContextManager[None]: ...
    def clip(self, norm: float) -> Tensor: ...
    def report(self, **values: float | Tensor) -> None: ...
    def save(self) -> None: ...
    def close(self, *, well: bool) -> None: ...
