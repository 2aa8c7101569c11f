"""WHOSE optimizer steps, and what is merged?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from weft.axis import Answer

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Something to be exchanged: it starts now, and its result enters when step `finish_step` has been computed.

    A delta is `state["anchor"] - mine`: the runtime puts the first parameters there, and `merge` may move them.
    """

    what: Literal["gradient", "model", "delta"]
    finish_step: int
    fragment: int | None = None
    """Which fragment of the model; None: all of it."""


@dataclass(frozen=True, kw_only=True)
class Optimization(Answer, ABC):
    """Which exchanges a worker owes after a step, and how what came back enters its model."""

    axis: ClassVar[str] = "optimization"
    accrues: ClassVar[bool] = False
    """Whether a worker adds its gradients up and moves a copy of its own, between two meetings with servers."""

    @property
    def period(self) -> int:
        """Steps after which what is due repeats."""
        return 1

    @property
    def pushes(self) -> float:
        """How often a worker's gradients leave it, in a step."""
        return 1.0

    @property
    def fetches(self) -> float:
        """How often servers send a worker the model, in a step."""
        return 1.0

    @abstractmethod
    def due(self, step: int) -> tuple[Exchange, ...]:
        """The exchanges that start when `step` has been computed."""

    @abstractmethod
    def merge(self, mine: Tensor, theirs: Tensor, state: State) -> tuple[Tensor, State]:
        """My tensor after meeting theirs (a gradient's mean, a neighbour's model, the mean delta)."""
