"""A worker's share of a step: its samples over those of all workers, counted by size or by the user's function."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from weft.errors import LoopError
from weft.transport.collective import Processes

Count = Callable[[Any], float | Tensor]
"""The number of samples, or tokens, that a batch counts for."""


def share_of(sizes: Sequence[float], rank: int, workers: int) -> tuple[float, int, float]:
    """A worker's share of a step's samples, exactly 1/n if all are equal; its samples, and those of all workers."""
    mine = sizes[rank] if rank < len(sizes) else 0
    if len(sizes) == workers and len(set(sizes)) == 1:
        return 1.0 / workers, math.ceil(mine), sum(sizes)
    return mine / sum(sizes), math.ceil(mine), sum(sizes)


class Shares:
    """The shares of one step's batches, by the user's own counts. They are gathered on first use."""

    def __init__(self, transport: Processes, mine: list[float]) -> None:
        self.transport, self.mine = transport, mine

    def of(self, rank: int) -> float:
        return share_of(self._counts, rank, len(self._counts))[0]

    def total(self) -> float:
        return sum(self._counts)

    @functools.cached_property
    def _counts(self) -> list[float]:
        """The counts of all workers, by rank; floats travel as integers of the same bits."""
        layout = self.transport.layout
        carried = [len(layout.carried(process)) for process in range(layout.processes)]
        bits = struct.unpack(f"{len(self.mine)}q", struct.pack(f"{len(self.mine)}d", *self.mine))
        rows = self.transport.tell([*bits, *[0] * (max(carried) - len(bits))])
        counts: list[float] = []
        for row, many in zip(rows, carried, strict=True):
            counts += struct.unpack(f"{many}d", struct.pack(f"{many}q", *row[:many]))
        if not sum(counts):
            raise LoopError("no worker has a sample in this step: samples= returned 0 for all; skip such batches")
        return counts


def counted(count: Count, batch: Any) -> float:
    """The result of the user's function for a batch."""
    found = float(count(batch))
    if not (math.isfinite(found) and found >= 0):
        raise LoopError(f"samples= returned {found} for a batch; return its number of samples, 0 or more")
    return found
