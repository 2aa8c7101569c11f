"""Which server keeps which part of the model, and which parts travel together.

Every large parameter is divided among all servers, so that whatever backward has just finished goes to all of them at
once and none is the hot spot, at any moment of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.ops import SMALL_BYTES, Spec
from weft.topology._parts import bounds

_COMPANY = 12
"""So many ranges travel together at most: a frame has sixteen parts."""


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


Bundle = tuple[Range, ...]
"""The unit of pushes, updates and pulls."""


def shards(specs: Sequence[Spec], servers: int, *, whole: bool = False) -> list[list[Range]]:
    """For each server its ranges, in the order of the parameters; a small parameter goes to the least loaded server.

    `whole`: no parameter is cut, for optimizers and compressors that need whole ones; the largest are assigned first.
    """
    found: list[list[Range]] = [[] for _ in range(servers)]
    loads = [0] * servers
    apart = [spec for spec in specs if whole or spec.nbytes < SMALL_BYTES * servers]
    for spec in specs:
        for server, (start, stop) in enumerate(bounds(spec.numel, servers) if spec not in apart else ()):
            found[server].append(Range(spec.name, start, stop))
            loads[server] += (stop - start) * spec.dtype.itemsize
    for spec in sorted(apart, key=lambda spec: -spec.nbytes):
        least = loads.index(min(loads))
        found[least].append(Range(spec.name, 0, spec.numel))
        loads[least] += spec.nbytes
    order = {spec.name: number for number, spec in enumerate(specs)}
    return [sorted(each, key=lambda part: order[part.name]) for each in found]


def bundles(
    ranges: Sequence[Range], specs: Sequence[Spec], *, least: int, most: int | None, alone: bool
) -> list[Bundle]:
    """One server's ranges as they travel: long ones cut to `most` bytes, neighbours of less than `least` together.

    `alone`: each by itself and uncut, for compressors, which describe one parameter at a time.
    """
    if alone:
        return [(part,) for part in ranges]
    size = {spec.name: spec.dtype.itemsize for spec in specs}
    found: list[Bundle] = []
    free_bytes = 0
    for part in ranges:
        nbytes = part.numel * size[part.name]
        if nbytes < least and free_bytes > 0 and len(found[-1]) < _COMPANY:
            found[-1] += (part,)
            free_bytes -= nbytes
            continue
        pieces = max(1, -(-nbytes // most)) if most else 1
        found += [(Range(part.name, part.start + a, part.start + b),) for a, b in bounds(part.numel, pieces)]
        free_bytes = least - nbytes if nbytes < least else 0
    return found
