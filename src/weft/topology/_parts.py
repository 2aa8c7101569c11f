"""Cutting a tensor into parts, and the two exchanges that several topologies share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.ops import Flow, Payload, Place, Recv, Scatter, Send

if TYPE_CHECKING:
    from torch import Tensor


def bounds(numel: int, parts: int) -> list[tuple[int, int]]:
    """`parts` contiguous ranges; all but the last few have ceil(numel / parts) elements."""
    size = -(-numel // parts)
    return [(min(i * size, numel), min((i + 1) * size, numel)) for i in range(parts)]


def pairwise(op: Scatter, me: int, place: Place) -> Flow[list[Payload]]:
    """All-to-all by plain messages; each worker starts with its right neighbour, so that receivers take turns."""
    n = place.workers
    for k in range(1, n):
        yield Send((me + k) % n, op.parts[(me + k) % n])
    got: list[Payload] = [()] * n
    got[me] = op.parts[me]
    for k in range(1, n):
        source = (me - k) % n
        got[source] = yield Recv(source, op.parts[me])
    return got


def pairwise_seconds(nbytes: int, place: Place) -> float:
    """n-1 parts leave one after another, the latency is paid once: a + (n-1)/n S/b."""
    n = place.workers
    return 0.0 if n == 1 else place.latency_s + (n - 1) * (nbytes / n) / place.bytes_per_s


def fold_groups(workers: int) -> int:
    """The largest power of two that is not above `workers`."""
    return 1 << (workers.bit_length() - 1)


def fold(mine: Tensor, me: int, place: Place) -> Flow[bool]:
    """Workers beyond the largest power of two give theirs to a partner. Returns whether I take part further."""
    core = fold_groups(place.workers)
    if me >= core:
        yield Send(me - core, (mine,))
        return False
    if me + core < place.workers:
        (other,) = yield Recv(me + core, (mine,))
        mine += other
    return True


def unfold(result: Payload, me: int, place: Place) -> Flow[Payload]:
    """Partners hand the result back to those that were folded away."""
    core = fold_groups(place.workers)
    if me >= core:
        got: Payload = yield Recv(me - core, result)
        return got
    if me + core < place.workers:
        yield Send(me + core, tuple(part.clone() for part in result))
    return result
