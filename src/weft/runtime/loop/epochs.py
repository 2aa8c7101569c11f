"""`run.epochs`: a loop over epochs that skips those an earlier attempt has completed, with all of their code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.errors import UserError

if TYPE_CHECKING:
    from weft.runtime.loop.data_position import DataPosition
    from weft.runtime.loop.shard import BetweenSteps


@dataclass
class EpochLoop:
    """The position of one loop over `run.epochs`."""

    completed: int = 0
    """The number of bodies that have ended."""
    first: int = 0
    """The number of iterations over loaders before the loop."""
    body: int = 0
    """The number of iterations over loaders before the present body, or before the next one."""
    inside: bool = False
    """Whether a body has begun and not ended."""
    cut: bool = False
    """Whether that body ended early because the run had taken all its steps."""
    over: bool = False
    """Whether the loop was left by `break`, or is at its end."""
    last: bool = False
    """Whether the present body is that of the last epoch."""

    def covers(self, number: int) -> bool:
        """Whether an iteration over a loader belongs to a body."""
        return self.first <= number and (self.inside or number < self.body)


class Epochs:
    """The result of `run.epochs(count)`."""

    def __init__(self, count: int, position: DataPosition, lifecycle: BetweenSteps) -> None:
        if count < 0:
            raise UserError(f"run.epochs({count}): give the number of epochs, 0 or more")
        self.count, self.position, self.lifecycle = count, position, lifecycle

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        position, loop = self.position, self.position.begin_loop()
        while loop.completed < self.count and not loop.over:
            if self.lifecycle.enough() and (loop.cut or not loop.inside):
                return
            loop.inside, loop.cut, loop.last = True, False, loop.completed + 1 == self.count
            try:
                yield loop.completed
            except GeneratorExit:  # the loop was left by `break`
                loop.over = True
                raise
            if self.lifecycle.enough() and position.is_open(loop.body):
                loop.cut = True
                return
            loop.completed, loop.body, loop.inside = loop.completed + 1, position.begun, False
        loop.over = True
