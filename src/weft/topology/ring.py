from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

from weft.ops import All, Collective, Flow, Payload, Place, Recv, Scatter, Send, Sum
from weft.topology import CollectiveTopology
from weft.topology._parts import bounds, pairwise, pairwise_seconds


@final
@dataclass(frozen=True, kw_only=True)
class Ring(CollectiveTopology):
    """Ring all-reduce: parts travel around a ring to be added, and once more to be distributed.

    Training uses the collective library's own. [Patarasuk & Yuan 2009]: 2(n-1)(a + S/(n b)).
    """

    exact: ClassVar[bool] = False
    native: ClassVar[Literal["", "direct", "all_reduce"]] = "all_reduce"

    def lower(self, op: Collective, me: int, place: Place) -> Flow[Any]:
        n = place.workers
        right, left = (me + 1) % n, (me - 1) % n
        if isinstance(op, Scatter):
            return (yield from pairwise(op, me, place))
        if isinstance(op, All):
            got: list[Payload] = [()] * n
            got[me] = op.payload
            for k in range(n - 1):
                yield Send(right, got[(me - k) % n])
                got[(me - k - 1) % n] = yield Recv(left, op.payload)
            return got
        assert isinstance(op, Sum)
        flat = op.payload.reshape(-1).clone()
        parts = [flat[a:b] for a, b in bounds(flat.numel(), n)]
        for k in range(n - 1):
            yield Send(right, (parts[(me - k) % n].clone(),))
            (got_part,) = yield Recv(left, (parts[(me - k - 1) % n],))
            parts[(me - k - 1) % n] += got_part
        for k in range(n - 1):
            yield Send(right, (parts[(me - k + 1) % n].clone(),))
            (got_part,) = yield Recv(left, (parts[(me - k) % n],))
            parts[(me - k) % n].copy_(got_part)
        return flat.reshape(op.payload.shape)

    def seconds(self, op: type[Collective], nbytes: int, place: Place) -> float:
        n = place.workers
        if op is Scatter:
            return pairwise_seconds(nbytes, place)
        if op is All:
            return (n - 1) * (place.latency_s + nbytes / place.bytes_per_s)
        return 2 * (n - 1) * (place.latency_s + nbytes / n / place.bytes_per_s)

    def wire_bytes(self, op: type[Collective], nbytes: int, workers: int) -> float:
        n = workers
        return (n - 1) * nbytes if op is All else (2 if op is Sum else 1) * (n - 1) / n * nbytes
