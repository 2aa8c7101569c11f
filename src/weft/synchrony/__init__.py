"""WHEN may a worker start its next step?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from weft.axis import Answer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class View:
    """The progress of all workers, as a server sees it."""

    clocks: tuple[int, ...]
    """The number of steps that each worker has finished."""
    gone: frozenset[int] = frozenset()
    """Workers that left or were lost; they are not waited for."""
    version: int = 0
    """The number of updates of the model so far."""
    reads: tuple[int, ...] = ()
    """The version that each worker read last; -1 before its first read."""
    unseen: tuple[float, ...] = ()
    """By worker: an upper bound of the change of a value by its updates that some worker has not read yet."""

    @property
    def members(self) -> int:
        """The number of workers present."""
        return len(self.clocks) - len(self.gone)

    @property
    def slowest(self) -> int:
        """The number of steps that every worker present has finished."""
        return min((clock for worker, clock in enumerate(self.clocks) if worker not in self.gone), default=0)


@dataclass(frozen=True, kw_only=True)
class Synchrony(Answer, ABC):
    """Decides on progress by pure functions of a `View`; the server or the exchange calls them."""

    axis: ClassVar[str] = "synchrony"
    lockstep: ClassVar[bool]
    """Whether each step needs every worker, so that all hold the same model."""
    bounds_values: ClassVar[bool] = False
    """Whether it uses `View.unseen`."""

    @property
    def looks_back(self) -> bool:
        """Whether `correct` uses the version that a worker read, which the server then keeps."""
        return False

    @property
    def eager(self) -> bool:
        """Whether servers send new versions before a pull arrives; `may_start` then uses clocks only."""
        return False

    @property
    def waits(self) -> bool:
        """Whether `may_start` can return False, so that every worker must report its progress in every step."""
        return True

    @abstractmethod
    def may_start(self, me: int, view: View) -> bool:
        """Whether worker `me` may start its next step."""

    @abstractmethod
    def quorum(self, view: View) -> int:
        """The number of contributions that close a round."""

    @abstractmethod
    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        """Correct a gradient computed with `read` for the model `now`; None if it is rejected."""

    def momentum(self, requested: float, workers: int) -> float:
        """The optimizer's effective momentum, if the loop sets `requested`."""
        return requested


@dataclass(frozen=True, kw_only=True)
class Wrapper(Synchrony):
    """Starts and closes rounds like the inner synchrony, and corrects stale gradients in its own way."""

    lockstep: ClassVar[bool] = False

    inner: Synchrony
    """The synchrony that decides when a worker may start."""

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

    def momentum(self, requested: float, workers: int) -> float:
        return self.inner.momentum(requested, workers)
