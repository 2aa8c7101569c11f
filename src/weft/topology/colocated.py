from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from weft.ops import Flow, Place, Sum
from weft.topology import ServerTopology
from weft.topology._parts import pairwise_seconds
from weft.topology._requests import push_and_pull

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Colocated(ServerTopology):
    """A server on every worker's host keeps a share of the model.

    A host's link carries (n-1)/n of the gradients out and as much of the model back, both ways: 2 (n-1)/n S, as with a
    ring, and no hosts are needed but the workers'.
    """

    exact: ClassVar[bool] = True

    encrypted: bool = False
    """Also encrypt on a trusted network. Other networks are always encrypted, and traffic within a machine never is."""

    @property
    def encrypts(self) -> bool:
        return self.encrypted

    def server_hosts(self, workers: int) -> tuple[int, ...]:
        return tuple(range(workers))

    def lower(self, op: Sum, me: int, place: Place) -> Flow[Tensor]:
        n = place.workers
        return (yield from push_and_pull(op.payload, range(n, 2 * n), me, n))

    def seconds(self, nbytes: int, place: Place) -> float:
        """Each phase is an all-to-all: 2 (a + (n-1)/n S/b)."""
        return 2 * pairwise_seconds(nbytes, place)

    def wire_bytes(self, nbytes: int, workers: int) -> float:
        return nbytes * (workers - 1) / workers

    def link_bytes(self, push_bytes: float, pull_bytes: float, workers: int) -> float:
        return (push_bytes + pull_bytes) * (workers - 1) / workers
