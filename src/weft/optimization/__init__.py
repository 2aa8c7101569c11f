"""WHOSE optimizer steps, and what is merged?

`Optimization` alone is one logical optimizer, stepped with mean gradients. `LocalSteps` are workers that step copies of
the model by themselves and exchange something with the servers now and then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from weft.axis import Answer

State = dict[str, Tensor]
"""What a merge remembers about one parameter."""
Side = Literal["worker"]
"""The side on which a model is merged."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """An exchange that starts after a step: a worker pushes its gradients, or fetches the servers' model."""

    what: Literal["gradient", "model"]


@dataclass(frozen=True, kw_only=True)
class Optimization(Answer, ABC):
    """How often gradients and models travel."""

    axis: ClassVar[str] = "optimization"

    @property
    def period(self) -> int:
        """Steps after which the exchanges repeat."""
        return 1

    @property
    def pushes(self) -> float:
        """Pushes of a worker's gradients in a step, on average."""
        return 1.0

    @property
    def fetches(self) -> float:
        """Fetches of the servers' model in a step, on average."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Optimization, ABC):
    """A worker steps a copy of the model with its own gradients, whose sum it pushes now and then."""

    @abstractmethod
    def local_update(self, param: Tensor, grad: Tensor, hyper: Mapping[str, Any]) -> None:
        """Step a parameter of the copy in place; `hyper` is its group of the loop's optimizer."""

    @abstractmethod
    def due(self, step: int) -> tuple[Exchange, ...]:
        """The exchanges that start when `step` has been computed. A step's push precedes its fetch."""

    @abstractmethod
    def merge(self, side: Side, mine: Tensor, theirs: Tensor, state: State) -> tuple[Tensor, State]:
        """The copy's parameter once the servers' has arrived, and what is remembered until the next time.

        `mine` and `theirs` are read-only; the result may be one of them.
        """
