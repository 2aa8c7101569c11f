from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from weft.ops import All, Collective, Flow, Place, Recv, Scatter, Send, Sum
from weft.topology import CollectiveTopology
from weft.topology._parts import pairwise, pairwise_seconds
from weft.topology.direct import Direct


@final
@dataclass(frozen=True, kw_only=True)
class Tree(CollectiveTopology):
    """Reduces gradients up a binomial tree, and broadcasts the sum down it [Iandola et al. 2016].

    One server's 2 n S becomes 2 ceil(lg n) S: 2 ceil(lg n) (a + S/b) where n is a power of two.
    """

    exact: ClassVar[bool] = False

    def lower(self, op: Collective, me: int, place: Place) -> Flow[Any]:
        if isinstance(op, Scatter):
            return (yield from pairwise(op, me, place))
        if isinstance(op, All):
            return (yield from Direct().lower(op, me, place))
        assert isinstance(op, Sum)
        total = op.payload.clone()
        distance = 1
        while distance < place.workers and me % (2 * distance) == 0:
            if me + distance < place.workers:
                (other,) = yield Recv(me + distance, (total,))
                total = total + other
            distance *= 2
        if me:
            yield Send(me - distance, (total,))
            (total,) = yield Recv(me - distance, (total,))
        while distance > 1:
            distance //= 2
            if me + distance < place.workers:
                yield Send(me + distance, (total.clone(),))
        return total

    def seconds(self, op: type[Collective], nbytes: int, place: Place) -> float:
        if op is Scatter:
            return pairwise_seconds(nbytes, place)
        if op is All:
            return Direct().seconds(op, nbytes, place)
        return 2 * depth(place.workers) * (place.latency_s + nbytes / place.bytes_per_s)

    def wire_bytes(self, op: type[Collective], nbytes: int, workers: int) -> float:
        return float(depth(workers) * nbytes) if op is Sum else Direct().wire_bytes(op, nbytes, workers)


def depth(workers: int) -> int:
    """Levels of the tree below its root."""
    return (workers - 1).bit_length()
