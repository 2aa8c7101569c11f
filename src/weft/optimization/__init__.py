"""WHOSE optimizer steps, and what is merged?

`Optimization` alone is one logical optimizer, stepped with mean gradients. Under `LocalSteps` workers step copies of
the model and exchange gradients or models with servers periodically.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from weft.axis import Answer

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]
"""The state of one parameter's merges."""
Side = Literal["worker"]
"""The side on which a model is merged."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """An exchange that starts after a step: a worker pushes its gradients, or fetches the servers' model."""

    what: Literal["gradient", "model"]


@dataclass(frozen=True, kw_only=True)
class Optimization(Answer, ABC):
    """The frequency of exchanges."""

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
    """A worker steps a copy of the model with its own gradients, and pushes their sum periodically."""

    @abstractmethod
    def local_update(self, param: Tensor, grad: Tensor, hyper: Mapping[str, Any]) -> None:
        """Step a parameter of the copy in place; `hyper` is its group of the loop's optimizer."""

    @abstractmethod
    def due(self, step: int) -> tuple[Exchange, ...]:
        """The exchanges that start when `step` has been computed. A step's push precedes its fetch."""

    @abstractmethod
    def merge(self, side: Side, mine: Tensor, theirs: Tensor, state: State) -> tuple[Tensor, State]:
        """The copy's new parameter after the servers' has arrived, and the state for the next merge.

        `mine` and `theirs` are read-only; the result may be one of them.
        """
