"""One connection of the mesh: its send queue, the message that it is reading, and its signs of life."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from weft.errors import PeerLost
from weft.transport.heartbeat import Pulse
from weft.transport.parcel import Parcel

HEADER = struct.Struct("!QQ")
"""Tag and length in bytes of the message that follows."""


@dataclass
class Inbound:
    """A message that is being received, or a receive that was posted for it."""

    into: memoryview
    parcel: Parcel | None
    """None: the message began before a receive was posted for it."""
    since: float = 0.0
    """When the receive was posted."""
    got: int = 0


@dataclass
class Peer:
    """The connection to one other process. `lock` guards the send queue; the rest belongs to the mesh's thread."""

    rank: int
    sock: socket.socket
    pulse: Pulse | None = None
    lost: PeerLost | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    outgoing: deque[tuple[list[memoryview], Parcel]] = field(default_factory=deque)
    header: bytearray = field(default_factory=lambda: bytearray(HEADER.size))
    header_got: int = 0
    reading: Inbound | None = None
    tag: int = 0
    events: int = selectors.EVENT_READ
    wake_bytes: int = 1
    """Bytes that must have arrived before the thread is woken."""
    last_read: float = 0.0
    last_write: float = 0.0
    """When bytes were last written, or the first message of the queue was posted."""

    def write(self) -> list[Parcel]:
        """Send as much of the queue as the connection takes; returns the parcels of messages that have left."""
        finished = []
        while self.outgoing:
            parts, parcel = self.outgoing[0]
            try:
                sent = self.sock.sendmsg(parts)
            except BlockingIOError:
                break
            self.last_write = time.monotonic()
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
            else:
                self.outgoing.popleft()
                finished.append(parcel)
        return finished

    def receive(self, into: memoryview) -> int:
        """Read what has arrived; returns the number of bytes, 0 where there are none."""
        try:
            got = self.sock.recv_into(into)
        except BlockingIOError:
            return 0
        if got == 0:
            raise ConnectionResetError(0, "the connection was closed")
        self.last_read = time.monotonic()
        return got

    def wake_at(self, wake_bytes: int) -> None:
        """Let the selector report this connection only when so many bytes have arrived."""
        if wake_bytes != self.wake_bytes:
            self.wake_bytes = wake_bytes
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)

    def exceeded_silence_s(self, patience_s: float | None, now: float) -> float | None:
        """The limit that the peer's silence has exceeded, if it has. Any byte from the peer is a sign of life."""
        silent_s = self.pulse.silent_s() if self.pulse is not None else None
        if self.pulse is None or silent_s is None or patience_s is None:
            return None
        limit_s = self.pulse.limit_s(patience_s)
        return limit_s if min(silent_s, now - self.last_read) > limit_s else None

    def close(self) -> None:
        """Close the connection and that of its heartbeats."""
        self.sock.close()
        if self.pulse is not None:
            self.pulse.close()


def peer_lost(rank: int, reason: str) -> PeerLost:
    """The error that ends every wait for a process that is gone."""
    return PeerLost(f"worker process {rank} went away in the middle of an exchange ({reason})")
