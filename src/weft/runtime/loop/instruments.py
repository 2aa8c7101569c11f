"""Instruments: objects from outside the runtime that observe or change how a process computes.

    with attached(Straggler(slow=Slow.parse("4x"))):
        child.main()                     # every run.distribute() in here attaches the straggler to its model

`run.distribute` attaches the current instruments before the model is distributed, so that they act below every mode.
They are held in a context variable: a run that is started in another thread has none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from weft.runtime.launch.world import World
    from weft.strategy import Strategy


class InstrumentedRun(Protocol):
    """The part of a run that an instrument may read."""

    @property
    def seed(self) -> int: ...

    @property
    def rank(self) -> int:
        """The logical worker whose pass it is."""

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""

    @property
    def strategy(self) -> Strategy: ...

    @property
    def world(self) -> World: ...


class Instrument(Protocol):
    """An object that observes or changes how a model computes."""

    def attach(self, run: InstrumentedRun, model: nn.Module, optimizer: Optimizer) -> None:
        """Hook into the user's model and optimizer, before the model is distributed."""


class ForeignWrapper(ABC):
    """Another library's way of distributing, which takes the place of the strategy."""

    @final  # noqa: B027
    def attach(self, run: InstrumentedRun, model: nn.Module, optimizer: Optimizer) -> None:
        """A wrapper acts after the model is distributed, in `wrap`; there is nothing to hook into before."""

    @abstractmethod
    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Model and optimizer for the user's loop. The processes are connected."""


_CURRENT: ContextVar[tuple[Instrument, ...]] = ContextVar("weft_instruments", default=())


@contextmanager
def attached(*instruments: Instrument) -> Iterator[None]:
    """Attach `instruments` to every model that is distributed inside this context, besides those around it."""
    token = _CURRENT.set((*_CURRENT.get(), *instruments))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> tuple[Instrument, ...]:
    """The instruments of this context, the outermost first."""
    return _CURRENT.get()


def foreign() -> ForeignWrapper | None:
    """The wrapper that takes the place of the strategy, if one is attached. There is at most one."""
    wrappers = [instrument for instrument in current() if isinstance(instrument, ForeignWrapper)]
    assert len(wrappers) <= 1, "a model has one wrapper"
    return wrappers[0] if wrappers else None
