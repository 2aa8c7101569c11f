from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from weft.optimization import Exchange, LocalSteps, Side, State

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Downpour(LocalSteps):
    """Workers train copies of the model, and servers step with sums of their gradients [Dean et al. 2012].

    In each step a worker accumulates its own gradient, and updates its copy by the learning rate times the gradient,
    whatever the optimizer is. Every `push` steps the sum is sent to the servers, without waiting; every `fetch` steps
    the servers' model replaces the copy. With 1 and 1, as in the paper's experiments, the result is that of `gradient`.
    The staleness of a gradient counts from the model that was fetched last, and includes the worker's own pushes since
    then. Under every schedule the sum leaves after backward, when it is complete.
    """

    push: int = 1
    """n_push: steps between two pushes of the accumulated gradients."""
    fetch: int = 1
    """n_fetch: steps between two fetches of the servers' model."""

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
