from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from weft.ops import Flow, Place, Sum
from weft.topology import ServerTopology
from weft.topology._parts import bounds
from weft.topology._requests import push_and_pull, round_trip_seconds

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Hierarchical(ServerTopology):
    """Workers in groups, each with an aggregator that sums their pushes and forwards the sum to the servers.

    The workers of a group take each step together, and the synchrony holds between groups: with asp they are SINGA's
    worker groups [Ooi et al. 2015], with bsp MXNet's two levels [Chen et al. 2015]. The servers' links carry g S
    instead of n S. An aggregator shares the host of the first worker of its group, whose link carries the group's m S.
    If m is a power of two, sums have the bits of `direct`.
    """

    exact: ClassVar[bool] = False

    groups: int = 2
    """g: the number of groups of adjacent workers; at most one for each worker."""
    servers: int = 1
    """k: the number of servers, on hosts of their own."""
    encrypted: bool = False
    """Also encrypt on a trusted network. Other networks are always encrypted, and traffic within a machine never is."""

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
        return (*range(workers, workers + self.servers), *(group[0] for group in self.worker_groups(workers)))

    def lower(self, op: Sum, me: int, place: Place) -> Flow[Tensor]:
        groups = self.worker_groups(place.workers)
        aggregator = place.workers + self.servers + next(at for at, group in enumerate(groups) if me in group)
        return (yield from push_and_pull(op.payload, [aggregator], 0, 1))

    def seconds(self, nbytes: int, place: Place) -> float:
        """To the aggregator, to the servers, and back: 2 (a + (m-1) S/b) + 2 (a + max(1, g/k) S/b)."""
        groups = self.worker_groups(place.workers)
        others = len(groups[0]) - 1
        near = place.latency_s * (others > 0) + others * nbytes / place.bytes_per_s
        return 2 * near + round_trip_seconds(nbytes, place, len(groups), self.servers)

    def wire_bytes(self, nbytes: int, workers: int) -> float:
        """The first worker of a group reaches its aggregator within the host: groups of one send nothing themselves."""
        return float(nbytes) if len(self.worker_groups(workers)[0]) > 1 else 0.0

    def link_bytes(self, push_bytes: float, pull_bytes: float, workers: int) -> float:
        """The link of an aggregator's host, or that of a server's."""
        groups = self.worker_groups(workers)
        others, share = len(groups[0]) - 1, len(groups) / self.servers
        aggregator = max(push_bytes + others * pull_bytes, others * push_bytes + pull_bytes)
        return max(aggregator, share * push_bytes, share * pull_bytes)
