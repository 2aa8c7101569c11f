"""A worker's share of a step: its samples over those of all workers, counted by size or by the user's own function."""

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
"""How many samples, or tokens, a batch counts for."""


def share_of(sizes: Sequence[float], rank: int, workers: int) -> tuple[float, int]:
    """A worker's share of a step's samples, and how many it has; exactly 1/n where all are equal."""
    mine = sizes[rank] if rank < len(sizes) else 0
    if len(sizes) == workers and len(set(sizes)) == 1:
        return 1.0 / workers, math.ceil(mine)
    return mine / sum(sizes), math.ceil(mine)


class Shares:
    """The shares of one step's batches, by counts of the user's own. The first who asks tells and hears them."""

    def __init__(self, transport: Processes, mine: list[float]) -> None:
        self.transport, self.mine = transport, mine

    def of(self, rank: int) -> float:
        return share_of(self._counts, rank, len(self._counts))[0]

    @functools.cached_property
    def _counts(self) -> list[float]:
        """Everyone's, by rank; floats travel as whole numbers of the same bits."""
        layout = self.transport.layout
        carried = [len(layout.carried(process)) for process in range(layout.processes)]
        bits = struct.unpack(f"{len(self.mine)}q", struct.pack(f"{len(self.mine)}d", *self.mine))
        rows = self.transport.tell([*bits, *[0] * (max(carried) - len(bits))])
        counts: list[float] = []
        for row, many in zip(rows, carried, strict=True):
            counts += struct.unpack(f"{many}d", struct.pack(f"{many}q", *row[:many]))
        if not sum(counts):
            raise LoopError("no worker has a sample in this step: samples= said 0 for all; leave such batches out")
        return counts


def counted(count: Count, batch: Any) -> float:
    """What the user's function says about a batch."""
    found = float(count(batch))
    if not (math.isfinite(found) and found >= 0):
        raise LoopError(f"samples= said {found} of a batch; return how many samples count in it, 0 or more")
    return found
