"""A server that counts the messages that it is sent, for the tests of messages."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weft.transport.messaging import Key, Request, Server

HERE = ("127.0.0.1", 0)
ECHO, ADD, NEVER = 1, 2, 3
WAIT_S = 20.0


class Ledger:
    """Serves ADD j (adds 1 at index j), ECHO, and leaves NEVER unanswered."""

    def __init__(self, size: int = 0) -> None:
        self.counts = [0] * size
        self.joined: list[str] = []
        self.left: list[tuple[str, str]] = []

    def handle(self, request: Request) -> None:
        if request.verb == ECHO:
            copies = [memoryview(bytes(part)) for part in request.parts]
            request.reply(copies)
        elif request.verb == ADD and len(request.parts) == 1 and len(request.parts[0]) == 4:
            (index,) = struct.unpack("!I", request.parts[0])
            if index < len(self.counts):
                self.counts[index] += 1
                request.reply()
            else:
                request.refuse(f"there is no index {index}")
        elif request.verb != NEVER:
            request.refuse("that is nothing I know")

    @property
    def hash(self) -> str:
        return hashlib.sha256(repr(self.counts).encode()).hexdigest()


@contextmanager
def serving(ledger: Ledger, key: Key, **options: Any) -> Iterator[Server]:
    server = Server(
        HERE, key, ledger.handle, joined=ledger.joined.append, left=lambda *who: ledger.left.append(who[:2]), **options
    )
    try:
        yield server
    finally:
        server.close()


def view(data: bytes) -> memoryview:
    return memoryview(data)
