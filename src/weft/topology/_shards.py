"""Which server keeps which part of the model: shares that differ by one value, so that none is the hot spot."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from weft.ops import Spec


@dataclass(frozen=True)
class Range:
    """The values [start, stop) of a parameter, flat."""

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def spec(self, of: Spec) -> Spec:
        """The range as a parameter of its own; with its shape, where it is whole."""
        if self.numel == of.numel:
            return of
        return Spec(f"{self.name}[{self.start}:{self.stop}]", (self.numel,), of.dtype)


def shards(specs: Sequence[Spec], servers: int, *, whole: bool = False) -> list[list[Range]]:
    """For each server its ranges. The parameters, one behind the other, are cut into equal parts by bytes.

    `whole`: no parameter is cut, for optimizers that look at all of one; the largest go first, each to the server that
    has least.
    """
    if whole:
        return _whole(specs, servers)
    total = sum(spec.nbytes for spec in specs)
    found: list[list[Range]] = [[] for _ in range(servers)]
    before = 0
    for spec in specs:
        item = spec.dtype.itemsize
        for server in range(servers):
            low, high = (total * end // servers for end in (server, server + 1))
            start, stop = (min(max(-(-(edge - before) // item), 0), spec.numel) for edge in (low, high))
            if stop > start:
                found[server].append(Range(spec.name, start, stop))
        before += spec.nbytes
    return found


def _whole(specs: Sequence[Spec], servers: int) -> list[list[Range]]:
    found: list[list[Range]] = [[] for _ in range(servers)]
    least = [(0, server) for server in range(servers)]
    order = {spec.name: number for number, spec in enumerate(specs)}
    for spec in sorted(specs, key=lambda spec: (-spec.nbytes, order[spec.name])):
        size, server = heapq.heappop(least)
        found[server].append(Range(spec.name, 0, spec.numel))
        heapq.heappush(least, (size + spec.nbytes, server))
    return [sorted(each, key=lambda part: order[part.name]) for each in found]
