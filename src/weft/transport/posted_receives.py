"""Matches messages that arrive with receives that were posted, by rank and tag, each side in its order.

These are the two queues of MPI implementations: receives posted before their message, and messages that arrive
unexpected, before their receive. A message with a posted receive is read straight into the memory of the receive.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from typing import final

from weft.errors import PeerLost
from weft.lazy import numpy
from weft.transport.parcel import Parcel
from weft.transport.peer import Inbound, peer_lost

_MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""The memory of this machine, which bounds the size of a message."""


@final
class PostedReceives:
    """Both queues, for all ranks. A message of another size than its receive raises OSError: the connection ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posted: dict[tuple[int, int], deque[Inbound]] = defaultdict(deque)
        self._unexpected: dict[tuple[int, int], deque[memoryview]] = defaultdict(deque)
        self._lost: dict[int, PeerLost] = {}

    def post(self, rank: int, tag: int, into: memoryview, parcel: Parcel) -> None:
        """Receive the next message of a rank and tag; done at once where it has arrived, or the rank is lost."""
        with self._lock:
            unexpected = self._unexpected.get((rank, tag))
            message = unexpected.popleft() if unexpected else None
            lost = self._lost.get(rank) if message is None else None
            if message is None and lost is None:
                self._posted[rank, tag].append(Inbound(into, parcel, time.monotonic()))
                return
        if message is not None and len(message) != len(into):
            lost = peer_lost(rank, _wrong_size(rank, len(message), len(into)))
        elif message is not None:
            into[:] = message
        parcel.finish_one(lost)

    def begin(self, rank: int, tag: int, size: int) -> Inbound:
        """The destination of a message that begins: its receive, or memory of its own where none was posted yet."""
        with self._lock:
            posted = self._posted.get((rank, tag))
            if posted:
                if len(posted[0].into) != size:
                    raise OSError(0, _wrong_size(rank, size, len(posted[0].into)))
                return posted.popleft()
        if size > _MEMORY_BYTES:
            raise OSError(0, f"it announces a message of {size} bytes, more than the memory of this machine")
        memory = numpy.empty(size, numpy.uint8)  # occupies memory as bytes arrive
        return Inbound(memoryview(memory), None)  # type: ignore[arg-type]

    def complete(self, rank: int, tag: int, message: Inbound) -> None:
        """All bytes of a message have arrived."""
        if message.parcel is None:
            with self._lock:
                posted = self._posted.get((rank, tag))
                if not posted:
                    self._unexpected[rank, tag].append(message.into)
                    return
                if len(posted[0].into) != len(message.into):
                    raise OSError(0, _wrong_size(rank, len(message.into), len(posted[0].into)))
                receive = posted.popleft()
            receive.into[:] = message.into
            message = receive
        assert message.parcel is not None
        message.parcel.finish_one()

    def oldest(self, rank: int) -> float | None:
        """When the oldest receive from a rank was posted, if there is one."""
        with self._lock:
            return min(
                (queue[0].since for (source, _), queue in self._posted.items() if queue and source == rank),
                default=None,
            )

    def lose(self, rank: int, lost: PeerLost) -> list[Inbound]:
        """Remove and return all receives from a rank; later ones fail as soon as they are posted."""
        with self._lock:
            self._lost[rank] = lost
            queues = [queue for (source, _), queue in self._posted.items() if source == rank]
            removed = [receive for queue in queues for receive in queue]
            for queue in queues:
                queue.clear()
        return removed


def _wrong_size(rank: int, sent: int, expected: int) -> str:
    return f"worker process {rank} sent {sent} bytes where {expected} were expected"
