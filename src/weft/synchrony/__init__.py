"""WHEN may a worker go on?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from weft.axis import Answer


@dataclass(frozen=True, kw_only=True)
class View:
    """What is known about everyone's progress: the steps that each worker has finished."""

    clocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Synchrony(Answer, ABC):
    """Yes/no answers about progress; whoever carries the messages asks them."""

    axis: ClassVar[str] = "synchrony"
    everyone: ClassVar[bool]
    """Whether each step takes every worker, so that all hold the same model."""

    @abstractmethod
    def may_start(self, me: int, view: View) -> bool:
        """Whether worker `me` may start its next step."""

    @abstractmethod
    def quorum(self, view: View) -> int:
        """How many contributions close a round."""

    @abstractmethod
    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        """A late gradient made fit for the model `now`, computed at `read`; None: not accepted."""
