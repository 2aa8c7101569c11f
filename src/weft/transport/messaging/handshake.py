"""How a connection begins: both sides show that they hold the run's key before anything else is said.

    asker    "weft-hello-1", its identity, its name, 32 random bytes
    server   32 random bytes, proof("server", both, what the asker said)
    asker    proof("asker", both, what the asker said)
    server   one byte: welcome

A connection for heartbeats begins in the same way with "weft-pulse-1", and is of no further use to anything else.

Where the network is not trusted all of this is said within TLS, in which both have shown the run's certificate. A proof
is an HMAC. A caller without the key gets the server's proof, from which it learns nothing about a key of 256 random
bits, and nothing after its own. Between two ends of one address nothing is on the network, and both may leave TLS out:
each sees that for itself, so nobody else can talk them into it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import ssl
import struct
import time
from dataclasses import dataclass

from weft.errors import PeerLost
from weft.transport.messaging.keys import Key
from weft.transport.messaging.streams import Plain, Stream, handshake

PATIENCE_S = 10.0
"""How long a stranger may take."""
_HELLO = struct.Struct("!12s16s64s32s")
_GREETING = b"weft-hello-1"
_PULSE = b"weft-pulse-1"
_PROOF = 32
_WELCOME = b"\1"


class Stranger(PeerLost):
    """The other side does not hold this run's key, or is no Weft at all."""


class SentAway(Stranger):
    """The connection ended before both sides had proved themselves, as it does where too many call at once."""


@dataclass(frozen=True)
class Guest:
    """Who asks: `identity` is one asker's life, over all its connections."""

    identity: bytes
    name: str
    pulse: bool = False
    """Whether the connection is for heartbeats: those of the link that the same asker has already."""


def receive(
    sock: socket.socket, key: Key, tls: ssl.SSLContext | None, *, encrypt_loopback: bool = True
) -> tuple[Stream, Guest]:
    """The server's side. Raises Stranger or OSError; takes PATIENCE_S at most."""
    deadline = time.monotonic() + PATIENCE_S
    stream = _stream(sock, tls if encrypt_loopback or not here(sock) else None, deadline, server=True)
    hello = _exactly(stream, _HELLO.size, deadline)
    greeting, identity, name, theirs = _HELLO.unpack(hello)
    if greeting not in (_GREETING, _PULSE):
        raise Stranger("something that is not Weft called")
    mine = secrets.token_bytes(32)
    _say(stream, mine + key.proof("server", theirs, mine, hello), deadline)
    if not hmac.compare_digest(_exactly(stream, _PROOF, deadline), key.proof("asker", theirs, mine, hello)):
        raise Stranger("somebody called without this run's key")
    _say(stream, _WELCOME, deadline)
    return stream, Guest(identity, name.rstrip(b"\0").decode(errors="replace"), greeting == _PULSE)


def call(
    address: tuple[str, int],
    guest: Guest,
    key: Key,
    tls: ssl.SSLContext | None,
    patience_s: float,
    *,
    encrypt_loopback: bool = True,
) -> Stream:
    """The asker's side: a connection on which the server has proved itself. Raises Stranger or OSError."""
    deadline = time.monotonic() + patience_s
    where = "{}:{}".format(*address)
    sock = socket.create_connection(address, timeout=patience_s)
    try:
        stream = _stream(sock, tls if encrypt_loopback or not here(sock) else None, deadline, server=False)
        mine = secrets.token_bytes(32)
        name = _fitting(guest.name.encode())
        hello = _HELLO.pack(_PULSE if guest.pulse else _GREETING, guest.identity, name, mine)
        _say(stream, hello, deadline)
        answer = _exactly(stream, 32 + _PROOF, deadline)
        theirs, proof = answer[:32], answer[32:]
        if not hmac.compare_digest(proof, key.proof("server", mine, theirs, hello)):
            raise Stranger(f"{where} has another key than this process; {_remedy(key)}")
        _say(stream, key.proof("asker", mine, theirs, hello), deadline)
        _exactly(stream, 1, deadline)
        return stream
    except (ssl.SSLError, ConnectionResetError, BrokenPipeError) as error:
        sock.close()
        kind = Stranger if isinstance(error, ssl.SSLError) else SentAway
        raise kind(f"{where} did not accept this process ({_words(error)}); {_remedy(key)}") from None
    except BaseException:
        sock.close()
        raise


def here(sock: socket.socket) -> bool:
    """Whether both ends of a connection are on this machine. Linux drops what comes from elsewhere under its own
    address."""
    return bool(sock.getpeername()[0] == sock.getsockname()[0])


def _fitting(name: bytes) -> bytes:
    """A name of at most 64 bytes; two long names that differ stay different."""
    return name if len(name) <= 64 else name[:47] + b"~" + hashlib.sha256(name).hexdigest()[:16].encode()


def _remedy(key: Key) -> str:
    place = f" to {key.file}" if key.file else ""
    return f"copy the key file of the run{place}, and give both sides the same --network"


def _words(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error)


def _stream(sock: socket.socket, tls: ssl.SSLContext | None, deadline: float, *, server: bool) -> Stream:
    return Plain(sock) if tls is None else handshake(sock, tls, deadline, server=server)


def _exactly(stream: Stream, size: int, deadline: float) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while len(view):
        got = stream.read(view)
        view = view[got:]
        if not got:
            _wait(stream, deadline, reading=True)
    return bytes(data)


def _say(stream: Stream, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while len(view) or stream.unsent:
        taken = stream.write([view] if len(view) else [])
        view = view[taken:]
        if len(view) or stream.unsent:
            _wait(stream, deadline, reading=False)


def _wait(stream: Stream, deadline: float, *, reading: bool) -> None:
    left = deadline - time.monotonic()
    ends = [stream.sock]
    if left <= 0 or not any(select.select(ends if reading else [], [] if reading else ends, [], left)):
        raise TimeoutError("the other side says nothing")
