from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from weft.ops import All, Collective, Flow, Place, Pull, Push, Scatter, Sum
from weft.topology import Topology
from weft.topology._parts import bounds, pairwise, pairwise_seconds
from weft.topology.direct import Direct


@final
@dataclass(frozen=True, kw_only=True)
class ParameterServer(Topology):
    """Servers of their own keep the model, a share each, and step its optimizer [Li et al. 2014].

    Workers push gradients and pull parameters: S bytes each way for a worker, n S / k for each of k servers, whose
    ports are what limits where k < n.
    """

    collective: ClassVar[bool] = False
    exact: ClassVar[bool] = True

    servers: int = 1
    """k: how many, on hosts of their own; 0: one for each worker."""
    encrypted: bool = False
    """Encrypt on a trusted network too; on others, messages always are, and within a machine never."""

    def __post_init__(self) -> None:
        if self.servers < 0:
            raise ValueError(f"servers is {self.servers}, but must be at least 1, or 0 for one for each worker")

    def count(self, workers: int) -> int:
        """k, for so many workers."""
        return self.servers or workers

    @property
    def encrypts(self) -> bool:
        return self.encrypted

    def server_hosts(self, workers: int) -> tuple[int, ...]:
        return tuple(range(workers, workers + self.count(workers)))

    def lower(self, op: Collective, me: int, place: Place) -> Flow[Any]:
        n = place.workers
        if isinstance(op, Scatter):
            return (yield from pairwise(op, me, place))
        if isinstance(op, All):
            return (yield from Direct().lower(op, me, place))
        assert isinstance(op, Sum)
        flat = op.payload.reshape(-1)
        edges = bounds(flat.numel(), self.count(n))
        for server, (a, b) in enumerate(edges):
            yield Push(n + server, (flat[a:b],))
        total = flat.clone()
        for server, (a, b) in enumerate(edges):
            (part,) = yield Pull(n + server)
            total[a:b] = part
        return total.reshape(op.payload.shape)

    def seconds(self, op: type[Collective], nbytes: int, place: Place) -> float:
        if op is Scatter:
            return pairwise_seconds(nbytes, place)
        if op is All:
            return Direct().seconds(op, nbytes, place)
        busiest = nbytes * max(1.0, place.workers / self.count(place.workers))
        return 2 * (place.latency_s + busiest / place.bytes_per_s)

    def link_bytes(self, op: type[Collective], nbytes: int, workers: int) -> float:
        return self.wire_bytes(op, nbytes, workers) * max(1.0, workers / self.count(workers))

    def wire_bytes(self, op: type[Collective], nbytes: int, workers: int) -> float:
        return float(nbytes) if op is Sum else Direct().wire_bytes(op, nbytes, workers)
