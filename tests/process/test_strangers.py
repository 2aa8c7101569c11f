"""Peers without the key, and peers with the key that send garbage, change nothing."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
from contextlib import suppress

from tests.process.message_ledger import ADD, ECHO, WAIT_S, Ledger, serving, view
from weft.transport.messaging import Client, Key, Server
from weft.transport.messaging import client as client_module
from weft.transport.messaging.frames import Head, Kind

# --- unauthenticated connections, and liars with the key --------------------------------------------------------------


FRAMES = int(os.environ.get("FUZZ_FRAMES", "100000"))


def memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def junk(rng: random.Random, counted: list[bytes]) -> bytes:
    """Garbage, oversized, truncated, replayed or merely odd."""
    whole = Head(Kind.ONCE, ADD, rng.randrange(1, 1 << 20), 0).pack([4]) + struct.pack("!I", 1 << 20)
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randrange(1, 200))
        case 1:
            return Head(Kind.QUERY, ECHO, 1).pack([1 << rng.randrange(27, 63)])
        case 2:
            return whole[: rng.randrange(1, len(whole))]
        case 3:
            return rng.choice(counted) if counted else whole
        case 4:
            return struct.pack("!4sBBHQQ", b"weft", rng.randrange(256), rng.randrange(256), 9, 2**64 - 1, 0)
        case _:
            return bytes(a ^ (rng.random() < 0.1) * rng.randrange(256) for a in whole)


def test_unauthenticated_connections_change_nothing(key: Key) -> None:
    """Without the key nothing is even read as a frame: each connection ends at the hello."""
    rng, ledger = random.Random(3), Ledger(1000)
    with serving(ledger, key, max_frame_bytes=1 << 20) as server:
        before, memory, sent = ledger.hash, memory_bytes(), 0
        while sent < FRAMES:
            with suppress(OSError), socket.create_connection(server.address, timeout=WAIT_S) as sock:
                sock.sendall(b"".join(junk(rng, []) for _ in range(500)))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
            sent += 500
        assert ledger.hash == before and not ledger.joined
        assert memory_bytes() - memory < 64 << 20
        _still_serves(server, key, ledger)


def test_liars_with_the_key_break_only_their_own_links(key: Key) -> None:
    """With the key odd frames end a link, replays count once, and the server lives."""
    rng, ledger = random.Random(4), Ledger(1000)
    with serving(ledger, key, max_frame_bytes=1 << 20) as server:
        memory, sent, number = memory_bytes(), 0, 0
        while sent < FRAMES:
            stream = client_module.call(server.address, client_module.Caller(b"liar" * 4, "liar"), key, None, WAIT_S)
            stream.sock.settimeout(WAIT_S)
            counted = []
            for _ in range(8):
                number += 1
                body = struct.pack("!I", number % 1000)
                counted.append(Head(Kind.ONCE, ADD, number, max(0, number - 30)).pack([4]) + body)
            said = counted + [rng.choice(counted) for _ in range(40)]
            said += [junk(rng, counted), junk(rng, counted)]
            with suppress(OSError):
                stream.sock.sendall(b"".join(said))
            stream.close()
            sent += len(said)
        assert max(ledger.counts) <= -(-number // 1000)
        assert memory_bytes() - memory < 64 << 20
        _still_serves(server, key, ledger)


def _still_serves(server: Server, key: Key, ledger: Ledger) -> None:
    asker = Client(server.address, key, "honest")
    before = ledger.counts[3]
    asker.ask(ADD, [view(struct.pack("!I", 3))], once=True).wait(WAIT_S)
    assert ledger.counts[3] == before + 1
    asker.close()
