"""WHOSE optimizer steps, and what is merged?

`Optimization` alone is one logical optimizer, stepped with mean gradients. Under `LocalSteps` workers step copies of
the model and exchange gradients or models with servers periodically. Under `ModelMerging` every worker steps a copy
with its own optimizer, and the copies are merged by a collective periodically.
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
class Merge:
    """A merge of one fragment of the model, which starts after a step."""

    finish_step: int
    """The step after which the result is used. The exchange runs beside the steps in between; the loop waits there."""
    fragment: int = 0


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


@dataclass(frozen=True, kw_only=True)
class ModelMerging(Optimization, ABC):
    """Every worker steps a copy of the model with its own optimizer, and the copies are merged by a collective.

    The *anchor* is the model that all workers share. A merge sums the workers' differences (anchor - copy), each
    weighted by the worker's share of the samples since its last merge, and moves the anchor by that mean.
    """

    @property
    def num_fragments(self) -> int:
        """The number of fragments: runs of neighbouring layers, which are merged separately."""
        return 1

    @property
    def outer_copies(self) -> int:
        """Tensors of the model's size that `merge` keeps from one merge to the next."""
        return 0

    @property
    def copies(self) -> int:
        """Copies of the model that a worker holds: its own, the anchor, a difference, and the state of merges."""
        return 3 + self.outer_copies

    @property
    def pushes(self) -> float:
        return 1 / self.period

    @property
    def fetches(self) -> float:
        return 0.0

    @property
    @abstractmethod
    def period(self) -> int:
        """Steps in which the whole model is merged once."""

    @abstractmethod
    def due(self, step: int) -> tuple[Merge, ...]:
        """The merges that start when `step` has been computed; at most one for each fragment."""

    @abstractmethod
    def merge(self, anchor: Tensor, difference: Tensor, state: State, workers: int) -> tuple[Tensor, State]:
        """A parameter's new anchor, and the state for its next merge; the same on all workers.

        `difference` is the mean of anchor - copy over the workers. The arguments are read-only, and their memory is
        used again: the state must not hold one of them.
        """

    def adopt(self, copy: Tensor, before: Tensor, after: Tensor, workers: int) -> Tensor:
        """A worker's new copy of a parameter, whose anchor was `before` and is `after`: the anchor itself."""
        return after


def at_least_one(**fields: int) -> None:
    """Raise ValueError for a field that counts steps or fragments and is less than 1."""
    for name, value in fields.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, but must be at least 1")


def fraction(**fields: float) -> None:
    """Raise ValueError for a field that is not in [0, 1)."""
    for name, value in fields.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value}, but must be at least 0 and less than 1")


def positive(**fields: float) -> None:
    """Raise ValueError for a field that is not greater than 0."""
    for name, value in fields.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} is {value}, but must be greater than 0")
