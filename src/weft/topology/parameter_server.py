from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from weft.ops import Flow, Place, Sum
from weft.topology import ServerTopology
from weft.topology._requests import push_and_pull, round_trip_seconds

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class ParameterServer(ServerTopology):
    """Servers of their own keep the model, a share each, and step its optimizer [Li et al. 2014].

    Workers push gradients and pull parameters: S bytes each way for a worker, n S / k for each of k servers. If k < n,
    the servers' links are the bottleneck.
    """

    exact: ClassVar[bool] = True

    servers: int = 1
    """k: the number of servers, on hosts of their own; 0: one for each worker."""
    encrypted: bool = False
    """Also encrypt on a trusted network. Other networks are always encrypted, and traffic within a machine never is."""

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

    def lower(self, op: Sum, me: int, place: Place) -> Flow[Tensor]:
        n = place.workers
        return (yield from push_and_pull(op.payload, range(n, n + self.count(n)), me, n))

    def seconds(self, nbytes: int, place: Place) -> float:
        return round_trip_seconds(nbytes, place, place.workers, self.count(place.workers))

    def wire_bytes(self, nbytes: int, workers: int) -> float:
        return float(nbytes)

    def link_bytes(self, push_bytes: float, pull_bytes: float, workers: int) -> float:
        return max(push_bytes, pull_bytes) * max(1.0, workers / self.count(workers))
