from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from weft.ops import All, Collective, Flow, Place, Scatter
from weft.topology import Topology
from weft.topology._parts import bounds, pairwise, pairwise_seconds
from weft.topology.direct import Direct


@final
@dataclass(frozen=True, kw_only=True)
class Hierarchical(Topology):
    """Workers in groups, each with a proxy that sums up what they push before it goes on to the servers.

    A group's workers take each step together, and the synchrony holds between groups: with asp they are SINGA's worker
    groups [Ooi et al. 2015], with bsp MXNet's two levels [Chen et al. 2015]. The servers' links carry g S where those
    of n workers would carry n S. A proxy sits beside the first worker of its group, whose link carries the group's m S.
    Where m is a power of two, sums have the bits of `direct`.
    """

    collective: ClassVar[bool] = False
    exact: ClassVar[bool] = False

    groups: int = 2
    """g: how many, at most one for each worker; they have neighbouring workers, and as many as can be."""
    servers: int = 1
    """k: how many servers the proxies push to, on hosts of their own."""
    encrypted: bool = False
    """Encrypt on a trusted network too; on others, messages always are, and within a machine never."""

    def __post_init__(self) -> None:
        for name, value in (("groups", self.groups), ("servers", self.servers)):
            if value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1")

    @property
    def encrypts(self) -> bool:
        return self.encrypted

    def worker_groups(self, workers: int) -> tuple[range, ...]:
        return tuple(range(a, b) for a, b in bounds(workers, min(self.groups, workers)) if a < b)

    def server_hosts(self, workers: int) -> tuple[int, ...]:
        return (*range(workers, workers + self.servers), *(team[0] for team in self.worker_groups(workers)))

    def lower(self, op: Collective, me: int, place: Place) -> Flow[Any]:
        if isinstance(op, Scatter):
            return (yield from pairwise(op, me, place))
        return (yield from Direct().lower(op, me, place))

    def seconds(self, op: type[Collective], nbytes: int, place: Place) -> float:
        """A sum goes to the proxy, on to the servers, and the same way back."""
        if op is Scatter:
            return pairwise_seconds(nbytes, place)
        if op is All:
            return Direct().seconds(op, nbytes, place)
        worker_groups = self.worker_groups(place.workers)
        others = len(worker_groups[0]) - 1
        near = place.latency_s * (others > 0) + others * nbytes / place.bytes_per_s
        far = place.latency_s + max(1.0, len(worker_groups) / self.servers) * nbytes / place.bytes_per_s
        return 2 * (near + far)

    def link_bytes(self, op: type[Collective], nbytes: int, workers: int) -> float:
        worker_groups = self.worker_groups(workers)
        return self.wire_bytes(op, nbytes, workers) * max(len(worker_groups[0]), len(worker_groups) / self.servers)

    def wire_bytes(self, op: type[Collective], nbytes: int, workers: int) -> float:
        return float(nbytes) if op is not All else Direct().wire_bytes(op, nbytes, workers)
