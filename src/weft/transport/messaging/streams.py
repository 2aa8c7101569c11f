"""Bytes over a connection that never waits: as they are, or through TLS."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

_UNSENT = 1024 * 1024
"""Bytes that may wait in the kernel, so that what is sent later but is more urgent is not held up behind more."""
_AT_ONCE = 256 * 1024


class Stream(Protocol):
    """What a link reads from and writes to; both take what can be done at once."""

    sock: socket.socket

    @property
    def unsent(self) -> bool:
        """Whether something that was taken still waits to leave."""

    def read(self, into: memoryview) -> int:
        """Fill as much as has come; 0: nothing has. Raises ConnectionError where the other side is gone."""

    def write(self, parts: Sequence[memoryview]) -> int:
        """Take as much as can leave; returns how many bytes were taken."""

    def close(self) -> None: ...


class Plain:
    """As they are."""

    unsent = False

    def __init__(self, sock: socket.socket) -> None:
        self.sock = tuned(sock)

    def read(self, into: memoryview) -> int:
        try:
            got = self.sock.recv_into(into)
        except BlockingIOError:
            return 0
        if got == 0:
            raise ConnectionResetError("the connection was closed")
        return got

    def write(self, parts: Sequence[memoryview]) -> int:
        try:
            return self.sock.sendmsg(parts)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        self.sock.close()


class Tls:
    """Through TLS, whose handshake is over. Records are made and opened in memory: one system call moves many."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLObject, coming: ssl.MemoryBIO, going: ssl.MemoryBIO) -> None:
        self.sock = tuned(sock)
        self._tls, self._coming, self._going = tls, coming, going
        self._rest = memoryview(b"")
        self._buffer = memoryview(bytearray(_AT_ONCE))

    @property
    def unsent(self) -> bool:
        return bool(self._rest)

    def read(self, into: memoryview) -> int:
        got = 0
        while got < len(into):
            try:
                some = self._tls.read(len(into) - got, into[got:])
            except ssl.SSLWantReadError:
                if not self._fetch():
                    break
                continue
            except ssl.SSLError as error:
                raise ConnectionResetError(f"TLS: {error.reason}") from None
            if not some:
                raise ConnectionResetError("the connection was closed")
            got += some  # type: ignore[operator]
        return got

    def _fetch(self) -> bool:
        try:
            got = self.sock.recv_into(self._buffer)
        except BlockingIOError:
            return False
        if got == 0:
            raise ConnectionResetError("the connection was closed")
        self._coming.write(self._buffer[:got])
        return True

    def write(self, parts: Sequence[memoryview]) -> int:
        if not self._flush():
            return 0
        taken = 0
        for part in parts:
            some = part[: _AT_ONCE - taken]
            taken += self._tls.write(some) if len(some) else 0
            if taken >= _AT_ONCE:
                break
        self._rest = memoryview(self._going.read())
        self._flush()
        return taken

    def _flush(self) -> bool:
        while self._rest:
            try:
                self._rest = self._rest[self.sock.send(self._rest) :]
            except BlockingIOError:
                return False
        return True

    def close(self) -> None:
        self.sock.close()


def handshake(sock: socket.socket, context: ssl.SSLContext, deadline: float, *, server: bool) -> Tls:
    """TLS over a connection that still waits. Raises TimeoutError where it is not over by the deadline."""
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(coming, going, server_side=server)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side takes too long")
        sock.settimeout(left)
        try:
            tls.do_handshake()
            done = True
        except ssl.SSLWantReadError:
            done = False
        except ssl.SSLError:
            with suppress(OSError):
                sock.sendall(going.read())  # the alert, which tells the other side
            raise
        sock.sendall(going.read())
        if done:
            return Tls(sock, tls, coming, going)
        some = sock.recv(16384)
        if not some:
            raise ConnectionResetError("the connection was closed")
        coming.write(some)


def tuned(sock: socket.socket) -> socket.socket:
    """Never waits, sends at once, and keeps little in the kernel."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
    return sock
