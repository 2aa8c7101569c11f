"""The connections of a mesh: one for each pair of processes, authenticated before the first message.

Each process listens, publishes its address in a store that all of them reach, and connects to the processes of lower
rank. Both sides then send a hello, the run's token and their rank. The token is random and is published in the store;
a connection that does not send it is closed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import Protocol

from weft.errors import JobError
from weft.transport.tcp import bound_address, connect, format_address, listen, parse_address, receive_exactly

_HELLO = struct.Struct("!16sI")
_CONNECT_S = 120.0
"""Limit for each connection: to connect and to authenticate, or until the next one arrives."""
_HELLO_S = 10.0
"""Limit for the hello on a connection that was accepted."""


class Store(Protocol):
    """A key-value store that all processes reach, as c10d's are; `get` waits until the key is there."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


def connect_all(
    process: int, processes: int, address: str, store: Store, purpose: str = "mesh"
) -> dict[int, socket.socket]:
    """An authenticated connection to every other process, by rank. `purpose` separates several sets of connections."""
    if process == 0:
        store.set(f"weft/{purpose}/token", secrets.token_hex(8))
    token = store.get(f"weft/{purpose}/token")
    hello = _HELLO.pack(token, process)
    socks: dict[int, socket.socket] = {}
    with listen((address, 0), backlog=processes) as listener:
        listener.settimeout(_CONNECT_S)
        store.set(f"weft/{purpose}/{process}", format_address(bound_address(listener)))
        try:
            for other in range(process):
                there = parse_address(store.get(f"weft/{purpose}/{other}").decode())
                deadline = time.monotonic() + _CONNECT_S
                sock = connect(there, deadline)
                try:
                    sock.sendall(hello)
                    _receive_hello(sock, token, deadline)
                except OSError:
                    sock.close()
                    raise
                socks[other] = sock
            while len(socks) < processes - 1:
                sock, _ = listener.accept()
                try:
                    rank = _receive_hello(sock, token, time.monotonic() + _HELLO_S)
                    sock.sendall(hello)
                    socks[rank] = sock
                except OSError:  # an unauthenticated connection; a process of this run would be missed below
                    sock.close()
        except OSError as error:
            missing = sorted(set(range(processes)) - set(socks) - {process})
            for sock in socks.values():
                sock.close()
            raise JobError(
                f"worker process {process} at {address} cannot be reached by, or cannot reach, {missing}: {error}; "
                "open the ports between the machines, or name the right interface in GLOO_SOCKET_IFNAME"
            ) from None
    return socks


def _receive_hello(sock: socket.socket, token: bytes, deadline: float) -> int:
    """The rank of the peer, once it has sent the token. Raises OSError."""
    theirs, rank = _HELLO.unpack(receive_exactly(sock, _HELLO.size, deadline))
    if not hmac.compare_digest(theirs, token):
        raise ConnectionError("the peer did not send this run's token")
    return int(rank)
