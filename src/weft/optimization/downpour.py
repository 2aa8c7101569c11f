from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from weft.optimization import Exchange, LocalSteps, Side, State


@final
@dataclass(frozen=True, kw_only=True)
class Downpour(LocalSteps):
    """The servers' optimizer steps with sums of gradients, of workers that go on with copies [Dean et al. 2012].

    In each step a worker adds its own gradient to what it has accrued, and moves its copy by the learning rate times
    the gradient, whatever the optimizer is. Every `push` steps the sum goes to the servers, and nobody waits for it;
    every `fetch` steps the servers' model takes the copy's place. With 1 and 1, as in the paper's experiments, that is
    what `gradient` does. A gradient's staleness counts from the model that was fetched last, the worker's own pushes
    since then included. Whatever the schedule, nothing leaves during backward: the sum is whole after it.
    """

    push: int = 1
    """n_push: steps whose gradients go to the servers as one sum."""
    fetch: int = 1
    """n_fetch: steps that a worker takes with its copy before it has the servers' model again."""

    def __post_init__(self) -> None:
        for name, steps in (("push", self.push), ("fetch", self.fetch)):
            if steps < 1:
                raise ValueError(f"{name} is {steps}, but must be at least 1")

    @property
    def period(self) -> int:
        return math.lcm(self.push, self.fetch)

    @property
    def pushes(self) -> float:
        return 1 / self.push

    @property
    def fetches(self) -> float:
        return 1 / self.fetch

    def local_update(self, param: Tensor, grad: Tensor, hyper: Mapping[str, Any]) -> None:
        """p -= lr g, or p += lr g where the optimizer maximizes."""
        rate = float(hyper["lr"]) * (-1 if hyper.get("maximize") else 1)
        param.add_(grad, alpha=-rate)

    def due(self, step: int) -> tuple[Exchange, ...]:
        pushed = (Exchange(what="gradient"),) if (step + 1) % self.push == 0 else ()
        fetched = (Exchange(what="model"),) if (step + 1) % self.fetch == 0 else ()
        return pushed + fetched

    def merge(self, side: Side, mine: Tensor, theirs: Tensor, state: State) -> tuple[Tensor, State]:
        """The servers' model replaces the copy."""
        return theirs, state
