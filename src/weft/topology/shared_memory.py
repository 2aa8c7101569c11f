from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from weft.ops import Collective, Flow, Place
from weft.topology import Topology
from weft.topology.direct import Direct


@final
@dataclass(frozen=True, kw_only=True)
class SharedMemory(Topology):
    """Workers of one host train one model in memory that they share, without locks [Niu et al. 2011].

    Each worker's optimizer steps the model where it lies, whatever the others do meanwhile: some of what they write is
    overwritten, which matters little where they seldom touch the same values. Nothing is sent.
    """

    collective: ClassVar[bool] = False
    exact: ClassVar[bool] = False

    @property
    def shares_memory(self) -> bool:
        return True

    def lower(self, op: Collective, me: int, place: Place) -> Flow[Any]:
        return (yield from Direct().lower(op, me, place))

    def seconds(self, op: type[Collective], nbytes: int, place: Place) -> float:
        return 0.0

    def wire_bytes(self, op: type[Collective], nbytes: int, workers: int) -> float:
        return 0.0
