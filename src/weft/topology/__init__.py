"""WHO talks to whom?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from weft.axis import Answer
from weft.ops import Collective, Flow, Place


@dataclass(frozen=True, kw_only=True)
class Topology(Answer, ABC):
    """Lowers what a compressor asks of everyone to messages between two, and says what that costs."""

    axis: ClassVar[str] = "topology"
    collective: ClassVar[bool]
    """Whether an exchange takes every worker."""
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

    @property
    def shares_memory(self) -> bool:
        """Whether all workers train one model in memory that they share."""
        return False

    def server_hosts(self, workers: int) -> tuple[int, ...]:
        """For each server the host it sits on: 0 to workers - 1 are the workers' own, others are the servers'.

        Those that keep the model come first, proxies last.
        """
        return ()

    def worker_groups(self, workers: int) -> tuple[range, ...]:
        """Workers who have a proxy in common and take each step together; none: everyone asks the servers."""
        return ()

    def num_shards(self, workers: int) -> int:
        """How many servers keep a share of the model."""
        return len(self.server_hosts(workers)) - len(self.worker_groups(workers))

    @abstractmethod
    def lower(self, op: Collective, me: int, place: Place) -> Flow[Any]:
        """The same operation as Send and Recv; returns the operation's result."""

    @abstractmethod
    def seconds(self, op: type[Collective], nbytes: int, place: Place) -> float:
        """Closed form for a payload of `nbytes` per worker: exact where it divides into equal parts."""

    @abstractmethod
    def wire_bytes(self, op: type[Collective], nbytes: int, workers: int) -> float:
        """Bytes that the busiest worker sends."""

    def link_bytes(self, op: type[Collective], nbytes: int, workers: int) -> float:
        """Bytes that the busiest host's link carries one way, servers' hosts included."""
        return self.wire_bytes(op, nbytes, workers)
