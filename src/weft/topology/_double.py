"""All-gather by recursive doubling, shared by the two recursive topologies: lg n a + (n-1) S/b."""

from __future__ import annotations

from weft.ops import All, Flow, Payload, Place, Recv, Send
from weft.topology._parts import fold_groups


def gather(op: All, me: int, place: Place) -> Flow[list[Payload]]:
    """Pairs at doubling distance exchange all that they have; a folded worker's payload rides with its partner's."""
    n, core, width = place.workers, fold_groups(place.workers), len(op.payload)
    have: dict[int, Payload] = {me: op.payload}
    if me >= core:
        yield Send(me - core, op.payload)
    else:
        if me + core < n:
            have[me + core] = yield Recv(me + core, op.payload)
        distance = 1
        while distance < core:
            peer = me ^ distance
            base = peer // distance * distance
            theirs = [r for r in range(n) if base <= r % core < base + distance]
            yield Send(peer, sum((have[r] for r in sorted(have)), ()))
            got: Payload = yield Recv(peer, op.payload * len(theirs))
            have |= {r: got[i * width : (i + 1) * width] for i, r in enumerate(theirs)}
            distance *= 2
        if me + core < n:
            yield Send(me + core, sum((have[r] for r in sorted(have)), ()))
    if me >= core:
        got = yield Recv(me - core, op.payload * n)
        have = {r: got[r * width : (r + 1) * width] for r in range(n)}
    return [have[r] for r in range(n)]


def gather_seconds(nbytes: int, place: Place) -> float:
    """Each round's time is that of its largest message; folding adds one message before and n after."""
    n, core = place.workers, fold_groups(place.workers)
    times = [place.latency_s + load * nbytes / place.bytes_per_s for load in _loads(n, core)]
    return sum(times)


def gather_bytes(nbytes: int, workers: int) -> float:
    """What worker 0 sends, the busiest."""
    core = fold_groups(workers)
    loads = _loads(workers, core)
    return sum(loads[1:] if core < workers else loads) * nbytes


def _loads(n: int, core: int) -> list[int]:
    """The largest number of payloads in one message, round by round."""
    rounds = []
    distance = 1
    while distance < core:
        rounds.append(sum(1 for r in range(n) if r % core < distance))
        distance *= 2
    return [1, *rounds, n] if core < n else rounds
