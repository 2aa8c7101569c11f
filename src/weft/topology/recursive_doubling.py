from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from weft.ops import All, Collective, Flow, Place, Recv, Scatter, Send, Sum
from weft.topology import CollectiveTopology
from weft.topology._double import gather, gather_bytes, gather_seconds
from weft.topology._parts import fold, fold_groups, pairwise, pairwise_seconds, unfold


@final
@dataclass(frozen=True, kw_only=True)
class RecursiveDoubling(CollectiveTopology):
    """Pairs at doubling distance exchange everything: few rounds, many bytes, good for small gradients.

    [Thakur et al. 2005]: lg n (a + S/b); where n is no power of two, the surplus folds first: + 2(a + S/b).
    """

    exact: ClassVar[bool] = False

    def lower(self, op: Collective, me: int, place: Place) -> Flow[Any]:
        if isinstance(op, Scatter):
            return (yield from pairwise(op, me, place))
        if isinstance(op, All):
            return (yield from gather(op, me, place))
        assert isinstance(op, Sum)
        mine = op.payload.reshape(-1).clone()
        if (yield from fold(mine, me, place)):
            distance = 1
            while distance < fold_groups(place.workers):
                peer = me ^ distance
                yield Send(peer, (mine.clone(),))
                (other,) = yield Recv(peer, (mine,))
                mine = mine + other if me < peer else other + mine  # one order on both sides, so one result
                distance *= 2
        (result,) = yield from unfold((mine,), me, place)
        return result.reshape(op.payload.shape)

    def seconds(self, op: type[Collective], nbytes: int, place: Place) -> float:
        if op is Scatter:
            return pairwise_seconds(nbytes, place)
        if op is All:
            return gather_seconds(nbytes, place)
        core = fold_groups(place.workers)
        rounds = core.bit_length() - 1 + (2 if core < place.workers else 0)
        return rounds * (place.latency_s + nbytes / place.bytes_per_s)

    def wire_bytes(self, op: type[Collective], nbytes: int, workers: int) -> float:
        if op is Scatter:
            return (workers - 1) / workers * nbytes
        if op is All:
            return gather_bytes(nbytes, workers)
        core = fold_groups(workers)
        return (core.bit_length() - 1 + (1 if core < workers else 0)) * nbytes
