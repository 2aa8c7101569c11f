"""WHO talks to whom?

Three kinds of topology: `CollectiveTopology` (workers exchange gradients with each other), `ServerTopology` (workers
push gradients to servers and pull the model from them) and `MemoryTopology` (workers share the memory of one model).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from weft.axis import Answer
from weft.ops import Collective, Flow, Place, Sum

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Topology(Answer, ABC):
    """Any topology. An answer derives from one of the three kinds below."""

    axis: ClassVar[str] = "topology"
    exact: ClassVar[bool]
    """Whether a sum has the same bits on any number of processes, with any buckets and any schedule."""
    native: ClassVar[Literal["", "direct", "all_reduce"]] = ""
    """The native form of a sum, which the transport uses instead of `lower`; empty: there is none.

    `direct`: messages, added in one fixed tree over ranks. `all_reduce`: the collective library's own.
    """

    @property
    def encrypts(self) -> bool:
        """Whether messages to servers are encrypted even where the network is trusted."""
        return False

    def homes(self, workers: int) -> tuple[int, ...]:
        """Deprecated alias of `ServerTopology.server_hosts`, kept for one release; () where there are no servers."""
        return self.server_hosts(workers) if isinstance(self, ServerTopology) else ()


@dataclass(frozen=True, kw_only=True)
class CollectiveTopology(Topology, ABC):
    """Lowers a collective to messages between pairs of workers, and states their cost."""

    @abstractmethod
    def lower(self, op: Collective, me: int, place: Place) -> Flow[Any]:
        """The same operation as Send and Recv; returns the operation's result."""

    @abstractmethod
    def seconds(self, op: type[Collective], nbytes: int, place: Place) -> float:
        """Closed form for a payload of `nbytes` per worker: exact where it divides into equal parts."""

    @abstractmethod
    def wire_bytes(self, op: type[Collective], nbytes: int, workers: int) -> float:
        """Bytes that the busiest worker sends."""


@dataclass(frozen=True, kw_only=True)
class ServerTopology(Topology, ABC):
    """Workers push gradients to servers, which keep the model, and pull the model.

    A server opens each push by itself (`runtime/server/compressed_push.py`), so that the only collective which servers
    carry is `Sum`. Actors are numbered as hosts are: workers first, then servers in the order of `server_hosts`.
    """

    @abstractmethod
    def server_hosts(self, workers: int) -> tuple[int, ...]:
        """The host of each server. Hosts 0 to workers - 1 are the workers' own, later ones belong to servers.

        Servers that keep a share of the model come first, aggregators last.
        """

    def worker_groups(self, workers: int) -> tuple[range, ...]:
        """Groups of workers that share an aggregator and take each step together; (): workers push to servers."""
        return ()

    def num_shards(self, workers: int) -> int:
        """Number of servers that keep a share of the model."""
        return len(self.server_hosts(workers)) - len(self.worker_groups(workers))

    @abstractmethod
    def lower(self, op: Sum, me: int, place: Place) -> Flow[Tensor]:
        """A worker's side of a sum as Push and Pull; returns the sum."""

    @abstractmethod
    def seconds(self, nbytes: int, place: Place) -> float:
        """Closed form for a push of `nbytes` per worker and a pull of as many: exact where all shares are equal.

        The whole payload is one message per server. The runtime cuts it into bundles, which overlap.
        """

    @abstractmethod
    def wire_bytes(self, nbytes: int, workers: int) -> float:
        """Bytes that leave the host of the busiest worker when each worker pushes `nbytes`."""

    @abstractmethod
    def link_bytes(self, push_bytes: float, pull_bytes: float, workers: int) -> float:
        """Bytes that the busiest host's link carries one way, servers' hosts included.

        Each worker pushes `push_bytes` and pulls `pull_bytes`, which differ where gradients are compressed.
        """


@dataclass(frozen=True, kw_only=True)
class MemoryTopology(Topology, ABC):
    """Workers train one model in memory that they share. Nothing is sent, so there is nothing to lower or to price."""
