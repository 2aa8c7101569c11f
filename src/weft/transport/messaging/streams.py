"""Non-blocking byte streams over a connection: plain, or through TLS."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, final

from weft.transport.tcp import remaining_s, tune

_CHUNK_BYTES = 256 * 1024
"""Bytes that TLS encrypts or reads together."""


class Stream(Protocol):
    """A connection whose reads and writes never block."""

    sock: socket.socket

    @property
    def unsent(self) -> bool:
        """Whether bytes that `write` has taken still wait to be sent."""

    def read(self, into: memoryview) -> int:
        """Read what has arrived; returns the number of bytes, perhaps 0. Raises ConnectionError at the end."""

    def write(self, parts: Sequence[memoryview]) -> int:
        """Take as much as can be sent; returns the number of bytes taken."""

    def close(self) -> None: ...


@final
class Plain:
    """Bytes as they are."""

    unsent = False

    def __init__(self, sock: socket.socket) -> None:
        self.sock = tune(sock)

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


@final
class Tls:
    """Bytes through TLS after its handshake. Records are built and opened in memory: one system call carries many."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLObject, coming: ssl.MemoryBIO, going: ssl.MemoryBIO) -> None:
        self.sock = tune(sock)
        self._tls, self._coming, self._going = tls, coming, going
        self._rest = memoryview(b"")
        self._buffer = memoryview(bytearray(_CHUNK_BYTES))

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
            some = part[: _CHUNK_BYTES - taken]
            taken += self._tls.write(some) if len(some) else 0
            if taken >= _CHUNK_BYTES:
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
    """The TLS handshake over a blocking socket. Raises TimeoutError where it is not complete by the deadline."""
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(coming, going, server_side=server)
    while True:
        sock.settimeout(remaining_s(deadline))
        try:
            tls.do_handshake()
            done = True
        except ssl.SSLWantReadError:
            done = False
        except ssl.SSLError:
            with suppress(OSError):
                sock.sendall(going.read())  # the alert, with the reason for the peer
            raise
        sock.sendall(going.read())
        if done:
            return Tls(sock, tls, coming, going)
        some = sock.recv(16384)
        if not some:
            raise ConnectionResetError("the connection was closed")
        coming.write(some)
