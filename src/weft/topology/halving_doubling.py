from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from weft.ops import All, Collective, Flow, Place, Recv, Scatter, Send, Sum
from weft.topology import CollectiveTopology
from weft.topology._double import gather, gather_bytes, gather_seconds
from weft.topology._parts import fold, fold_groups, pairwise, pairwise_seconds, unfold

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class HalvingDoubling(CollectiveTopology):
    """Pairs exchange halves, then quarters, and distribute the sums in reverse: few rounds and few bytes.

    [Rabenseifner 2004]: 2 lg n a + 2(n-1)/n S/b; where n is no power of two, the surplus folds: + 2(a + S/b).
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
            yield from _halve_and_double(mine, me, fold_groups(place.workers))
        (result,) = yield from unfold((mine,), me, place)
        return result.reshape(op.payload.shape)

    def seconds(self, op: type[Collective], nbytes: int, place: Place) -> float:
        if op is Scatter:
            return pairwise_seconds(nbytes, place)
        if op is All:
            return gather_seconds(nbytes, place)
        core = fold_groups(place.workers)
        a, per_s = place.latency_s, place.bytes_per_s
        folds = 2 * (a + nbytes / per_s) if core < place.workers else 0.0
        return 2 * (core.bit_length() - 1) * a + 2 * (core - 1) / core * nbytes / per_s + folds

    def wire_bytes(self, op: type[Collective], nbytes: int, workers: int) -> float:
        if op is Scatter:
            return (workers - 1) / workers * nbytes
        if op is All:
            return gather_bytes(nbytes, workers)
        core = fold_groups(workers)
        return 2 * (core - 1) / core * nbytes + (nbytes if core < workers else 0)


def _halve_and_double(mine: Tensor, me: int, core: int) -> Flow[None]:
    """In place: reduce-scatter by halving, then all-gather by doubling, over the same pairs."""
    lo, hi = 0, mine.numel()
    path: list[tuple[int, int, int, int, int]] = []
    distance = core // 2
    while distance:
        peer, mid = me ^ distance, lo + (hi - lo + 1) // 2
        keep, give = ((lo, mid), (mid, hi)) if me < peer else ((mid, hi), (lo, mid))
        yield Send(peer, (mine[slice(*give)].clone(),))
        (other,) = yield Recv(peer, (mine[slice(*keep)],))
        mine[slice(*keep)] += other
        path.append((peer, *keep, *give))
        lo, hi = keep
        distance //= 2
    for peer, keep_lo, keep_hi, give_lo, give_hi in reversed(path):
        yield Send(peer, (mine[keep_lo:keep_hi].clone(),))
        (other,) = yield Recv(peer, (mine[give_lo:give_hi],))
        mine[give_lo:give_hi] = other
