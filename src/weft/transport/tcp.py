"""TCP sockets: addresses, connecting and listening, deadlines, and socket options, for all connections of a process."""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress

from weft.errors import UserError

Address = tuple[str, int]

_MAX_UNSENT_BYTES = 1024 * 1024
"""Bytes of a connection that may wait in the kernel: 8 ms at 1 Gbit/s.

A message of higher priority waits behind these at most.
"""
_KEEPALIVE_S = 30
_TCP_THIN_LINEAR_TIMEOUTS = 16


# --- addresses ------------------------------------------------------------------------------------------------------


def parse_address(text: str) -> Address:
    """The host and port of HOST:PORT; an IPv6 host may stand in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"'{text}' is not an address; write HOST:PORT, as in 10.0.0.1:29500")
    return host.strip("[]"), int(port)


def format_address(address: Address) -> str:
    """HOST:PORT, the inverse of `parse_address`; an IPv6 host stands in brackets."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound_address(listener: socket.socket) -> Address:
    """The address at which a socket listens, with the port that the system chose for port 0."""
    host, port = listener.getsockname()[:2]
    return str(host), int(port)


# --- connections ----------------------------------------------------------------------------------------------------


def listen(address: Address, *, backlog: int) -> socket.socket:
    """A socket that listens at one address; port 0 lets the system choose one."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=backlog)


def connect(address: Address, deadline: float) -> socket.socket:
    """A connection to an address. Raises TimeoutError at the deadline, a time of `time.monotonic`."""
    return socket.create_connection(address, timeout=remaining_s(deadline))


def receive_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    """The next `size` bytes of a blocking socket.

    Raises TimeoutError at the deadline, even where single bytes keep arriving, and ConnectionResetError at the end of
    the stream.
    """
    received = b""
    while len(received) < size:
        sock.settimeout(remaining_s(deadline))
        chunk = sock.recv(size - len(received))
        if not chunk:
            raise ConnectionResetError("the connection was closed")
        received += chunk
    return received


def remaining_s(deadline: float) -> float:
    """Seconds until a deadline. Raises TimeoutError once it has passed."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the peer did not answer in time")
    return left_s


# --- socket options -------------------------------------------------------------------------------------------------


def tune(sock: socket.socket) -> socket.socket:
    """Options of a connection that carries data: non-blocking, no delay, little in the kernel's send buffer.

    Cubic, because flows of BBR that share a link probe and pause: four hosts used 85 % of their links instead of 97 %.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)
    return sock


def bound_silence(sock: socket.socket, timeout_s: float) -> None:
    """Let the kernel end a connection whose peer acknowledges nothing for `timeout_s`, or answers no keepalive."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # applies to a peer that runs and does not read, too
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * timeout_s))


def tune_heartbeat(sock: socket.socket) -> None:
    """Options of a connection that carries single bytes: no delay, and retransmission without exponential backoff.

    On a crowded link a lost heartbeat is then sent again every 0.2 s.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)
