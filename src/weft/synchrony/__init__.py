"""WHEN may a worker go on?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from weft.axis import Answer


@dataclass(frozen=True, kw_only=True)
class View:
    """What a server knows about everyone's progress."""

    clocks: tuple[int, ...]
    """The steps that each worker has finished."""
    gone: frozenset[int] = frozenset()
    """Workers that left or were lost; nobody waits for them."""
    version: int = 0
    """Updates of the model so far."""
    reads: tuple[int, ...] = ()
    """The version that each worker has read last; -1: none."""
    unseen: tuple[float, ...] = ()
    """By worker: how far its updates that not everyone has read yet may have moved a value."""

    @property
    def members(self) -> int:
        """How many are there."""
        return len(self.clocks) - len(self.gone)

    @property
    def slowest(self) -> int:
        """The steps that everyone who is there has finished."""
        return min((clock for worker, clock in enumerate(self.clocks) if worker not in self.gone), default=0)


@dataclass(frozen=True, kw_only=True)
class Synchrony(Answer, ABC):
    """Yes/no answers about progress; whoever carries the messages asks them."""

    axis: ClassVar[str] = "synchrony"
    lockstep: ClassVar[bool]
    """Whether each step takes every worker, so that all hold the same model."""
    bounds_values: ClassVar[bool] = False
    """Whether it looks at `View.unseen`."""

    @property
    def looks_back(self) -> bool:
        """Whether `correct` looks at what a worker had read, which a server then keeps."""
        return False

    @property
    def eager(self) -> bool:
        """Whether servers send new versions before they are asked; `may_start` then looks at clocks alone."""
        return False

    @property
    def waits(self) -> bool:
        """Whether `may_start` can say no, so that everyone must tell how far it is in every step."""
        return True

    @abstractmethod
    def may_start(self, me: int, view: View) -> bool:
        """Whether worker `me` may start its next step."""

    @abstractmethod
    def quorum(self, view: View) -> int:
        """How many contributions close a round."""

    @abstractmethod
    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        """A late gradient made fit for the model `now`, computed at `read`; None: not accepted."""

    def momentum(self, asked: float, workers: int) -> float:
        """The momentum that the optimizer should have, where the loop asks for so much."""
        return asked


@dataclass(frozen=True, kw_only=True)
class Wrapper(Synchrony):
    """Goes on as the inner one does, and makes late gradients fit in its own way."""

    lockstep: ClassVar[bool] = False

    inner: Synchrony
    """Who may go on when."""

    @property
    def looks_back(self) -> bool:
        return self.inner.looks_back

    @property
    def eager(self) -> bool:
        return self.inner.eager

    @property
    def waits(self) -> bool:
        return self.inner.waits

    def may_start(self, me: int, view: View) -> bool:
        return self.inner.may_start(me, view)

    def quorum(self, view: View) -> int:
        return self.inner.quorum(view)

    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        return self.inner.correct(grad, now, read, staleness)

    def momentum(self, asked: float, workers: int) -> float:
        return self.inner.momentum(asked, workers)
