"""Mutual authentication at the beginning of a connection: both sides prove that they hold the run's key.

    client   hello: "weft-hello-1", its identity, its name, 32 random bytes
    server   32 random bytes, proof("server", both random values, hello)
    client   proof("asker", both random values, hello)
    server   one byte: accepted

A proof is an HMAC-SHA-256. A connection for heartbeats sends "weft-pulse-1" instead, and carries nothing else later. No
frame is read before the client's proof, and the whole handshake has one deadline.

On an untrusted network the handshake takes place within TLS 1.3, in which both sides have shown the run's certificate.
An unauthenticated connection receives the server's proof, which reveals nothing about a key of 256 random bits, and
nothing else. Bytes between two ends of one address do not leave the machine, so both sides may leave TLS out there.
Each side compares the addresses itself; a third party cannot make them do so.
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
from weft.transport.tcp import Address, connect, format_address, remaining_s

PATIENCE_S = 10.0
"""Limit for the whole handshake of an unauthenticated connection, TLS included."""
_HELLO = struct.Struct("!12s16s64s32s")
_LINK = b"weft-hello-1"
_PULSE = b"weft-pulse-1"
_PROOF = 32
_ACCEPTED = b"\1"


class Stranger(PeerLost):
    """The peer could not be authenticated: it does not hold this run's key, or is not Weft."""


class SentAway(Stranger):
    """The peer closed the connection during the handshake, as a server with too many unauthenticated ones does."""


@dataclass(frozen=True)
class Caller:
    """A client as the server knows it. `identity` is drawn for each client object and is the same on all its links."""

    identity: bytes
    name: str
    pulse: bool = False
    """Whether the connection is for heartbeats, beside a link of the same client."""


def receive(
    sock: socket.socket, key: Key, tls: ssl.SSLContext | None, *, encrypt_loopback: bool = True
) -> tuple[Stream, Caller]:
    """Authenticate a client. Raises Stranger or OSError, after PATIENCE_S at most."""
    deadline = time.monotonic() + PATIENCE_S
    stream = _stream(sock, tls if encrypt_loopback or not here(sock) else None, deadline, server=True)
    hello = _exactly(stream, _HELLO.size, deadline)
    greeting, identity, name, theirs = _HELLO.unpack(hello)
    if greeting not in (_LINK, _PULSE):
        raise Stranger("the client is not Weft")
    mine = secrets.token_bytes(32)
    _write(stream, mine + key.proof("server", theirs, mine, hello), deadline)
    if not hmac.compare_digest(_exactly(stream, _PROOF, deadline), key.proof("asker", theirs, mine, hello)):
        raise Stranger("the client does not hold this run's key")
    _write(stream, _ACCEPTED, deadline)
    return stream, Caller(identity, name.rstrip(b"\0").decode(errors="replace"), greeting == _PULSE)


def call(
    address: Address,
    caller: Caller,
    key: Key,
    tls: ssl.SSLContext | None,
    patience_s: float,
    *,
    encrypt_loopback: bool = True,
) -> Stream:
    """Connect to a server and authenticate it. Raises Stranger or OSError, after `patience_s` at most."""
    deadline = time.monotonic() + patience_s
    where = format_address(address)
    sock = connect(address, deadline)
    try:
        stream = _stream(sock, tls if encrypt_loopback or not here(sock) else None, deadline, server=False)
        mine = secrets.token_bytes(32)
        name = _fitting(caller.name.encode())
        hello = _HELLO.pack(_PULSE if caller.pulse else _LINK, caller.identity, name, mine)
        _write(stream, hello, deadline)
        answer = _exactly(stream, 32 + _PROOF, deadline)
        theirs, proof = answer[:32], answer[32:]
        if not hmac.compare_digest(proof, key.proof("server", mine, theirs, hello)):
            raise Stranger(f"{where} holds another key than this process; {_remedy(key)}")
        _write(stream, key.proof("asker", mine, theirs, hello), deadline)
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
    """Whether both ends of a connection are on this machine: Linux drops packets from elsewhere under its address."""
    return bool(sock.getpeername()[0] == sock.getsockname()[0])


def _fitting(name: bytes) -> bytes:
    """A name of at most 64 bytes; a longer one is cut and ends with its hash, so that names stay distinct."""
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


def _write(stream: Stream, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while len(view) or stream.unsent:
        taken = stream.write([view] if len(view) else [])
        view = view[taken:]
        if len(view) or stream.unsent:
            _wait(stream, deadline, reading=False)


def _wait(stream: Stream, deadline: float, *, reading: bool) -> None:
    left_s, ends = remaining_s(deadline), [stream.sock]
    if not any(select.select(ends if reading else [], [] if reading else ends, [], left_s)):
        raise TimeoutError("the peer did not answer in time")
