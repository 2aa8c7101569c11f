"""A sum through servers, as requests: each server gets its share and returns the sum of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.ops import Await, Flow, Issue, Place, Pull, Push
from weft.topology._parts import bounds

if TYPE_CHECKING:
    from torch import Tensor


def push_and_pull(payload: Tensor, servers: Sequence[int], me: int, askers: int) -> Flow[Tensor]:
    """Push a share to each of `servers` and pull its new values, without waiting in between.

    Asker `me` of `askers` starts with a server of its own if there are enough, so that load is even.
    """
    k, flat = len(servers), payload.reshape(-1)
    cuts = bounds(flat.numel(), k)
    order = [(me * k // askers + i) % k for i in range(k)]
    for at in order:
        yield Issue(Push(servers[at], (flat[slice(*cuts[at])],)))
        yield Issue(Pull(servers[at]))
    total = flat.clone()
    for at in order:
        yield Await(servers[at])
        (part,) = yield Await(servers[at])
        total[slice(*cuts[at])] = part
    return total.reshape(payload.shape)


def round_trip_seconds(nbytes: int, place: Place, askers: int, servers: int) -> float:
    """n askers and k servers on hosts of their own: 2 (a + max(1, n/k) S/b).

    Where k > n, servers close their rounds one after another and the first replies overlap the last pushes:
    (1/n - 1/k) S/b less. Exact where one of n and k divides the other.
    """
    busiest, early = max(1.0, askers / servers), max(0.0, 1 / askers - 1 / servers)
    return 2 * place.latency_s + (2 * busiest - early) * nbytes / place.bytes_per_s
