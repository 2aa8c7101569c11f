from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from weft.ops import All, Collective, Flow, Place, Scatter
from weft.topology import Topology
from weft.topology._parts import pairwise, pairwise_seconds
from weft.topology.direct import Direct


@final
@dataclass(frozen=True, kw_only=True)
class Colocated(Topology):
    """Every worker's host keeps a share of the model too, in a server beside the worker.

    A host's link carries (n-1)/n of the gradients out and as much of the model back, both ways: 2 (n-1)/n S, as with a
    ring, and no hosts are needed but the workers'.
    """

    collective: ClassVar[bool] = False
    exact: ClassVar[bool] = True

    encrypted: bool = False
    """Encrypt on a trusted network too; on others, messages always are, and within a machine never."""

    @property
    def encrypts(self) -> bool:
        return self.encrypted

    def server_hosts(self, workers: int) -> tuple[int, ...]:
        return tuple(range(workers))

    def lower(self, op: Collective, me: int, place: Place) -> Flow[Any]:
        if isinstance(op, Scatter):
            return (yield from pairwise(op, me, place))
        return (yield from Direct().lower(op, me, place))

    def seconds(self, op: type[Collective], nbytes: int, place: Place) -> float:
        return pairwise_seconds(nbytes, place) if op is Scatter else Direct().seconds(op, nbytes, place)

    def link_bytes(self, op: type[Collective], nbytes: int, workers: int) -> float:
        return 2 * self.wire_bytes(op, nbytes, workers)

    def wire_bytes(self, op: type[Collective], nbytes: int, workers: int) -> float:
        return nbytes * (workers - 1) / workers if op is not All else Direct().wire_bytes(op, nbytes, workers)
