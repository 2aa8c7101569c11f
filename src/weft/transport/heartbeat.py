"""Heartbeats between processes that do not need Python's interpreter lock.

A job may hold the lock for a minute (a large `pickle.load`, a sort, an extension that never releases it), and no Python
thread of its process runs meanwhile. So a thread of heartbeat.cpp sends one byte each interval over a separate
connection to each peer, and measures how long each peer has been silent. SIGSTOP, a frozen machine and a cut cable stop
these heartbeats; the lock does not. Without a compiler a Python thread does the same. A heartbeat names the kind of its
sender, and a sender in Python may be silent for `WITHOUT_NATIVE_S` seconds.

A heartbeat proves only that bytes arrive. Its connection is authenticated in the same way as the one that carries data
(messaging: the run's key, within TLS on an untrusted network; the mesh: the run's token), and carries nothing else
afterwards, outside of TLS. An attacker who can write to the network can make a dead process look alive until
`WEFT_TIMEOUT_S`, or cut the connection, as with any connection. He learns nothing, and only the kind of the sender is
read.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from weft.environment import Timeouts
from weft.native import load
from weft.transport.tcp import tune_heartbeat

WITHOUT_NATIVE_S = 60.0
"""Limit for the silence of a peer whose heartbeats need the interpreter lock."""
_SOURCE = Path(__file__).with_name("heartbeat.cpp")
_FLAGS = ["-O2", "-std=c++17", "-shared", "-fPIC", "-pthread"]
_PYTHON = 2
"""The byte of a sender in Python; heartbeat.cpp has that of the native one."""


def peer_timeout_s(env: Mapping[str, str] = os.environ) -> float:
    """Limit in seconds until a peer without a sign of life is named."""
    return Timeouts.from_env(env).peer_timeout_s


class Pulse:
    """One connection that carries heartbeats in both directions."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over the socket."""
        tune_heartbeat(sock)
        self._heart = _heart(os.getpid())
        self._place = self._heart.add(sock.detach())
        self._closed = False

    def silent_s(self) -> float | None:
        """Seconds since the last heartbeat, counted while this process itself ran; None: the connection has ended."""
        silent = -1.0 if self._closed else self._heart.silent(self._place)
        return None if silent < 0 else silent

    def limit_s(self, patience_s: float) -> float:
        """Limit for the silence of the peer, in seconds: longer where its heartbeats come from Python."""
        slow = not self._closed and self._heart.sender(self._place) == _PYTHON
        return max(patience_s, WITHOUT_NATIVE_S) if slow else patience_s

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._heart.drop(self._place)


def prepare() -> None:
    """Compile and start the heartbeats of this process, before a peer expects them."""
    _heart(os.getpid())


class _Heart(Protocol):
    """The sender and receiver of all heartbeats of a process."""

    def add(self, fd: int) -> int: ...
    def silent(self, place: int) -> float: ...
    def sender(self, place: int) -> int: ...
    def drop(self, place: int) -> None: ...


@functools.cache
def _heart(pid: int) -> _Heart:
    """The instance of this process; a fork has its own."""
    interval_s = min(0.25, peer_timeout_s() / 10)
    library = load(_SOURCE, _FLAGS, f"a worker that holds Python's lock for {WITHOUT_NATIVE_S:g} s is taken for dead")
    return _Native(library, interval_s) if library is not None else _Threaded(interval_s)


class _Native:
    """The thread of heartbeat.cpp."""

    def __init__(self, library: ctypes.CDLL, interval_s: float) -> None:
        self._library = library
        library.heart_start.restype, library.heart_start.argtypes = ctypes.c_void_p, [ctypes.c_double]
        library.heart_silent.restype = ctypes.c_double
        for name in ("heart_add", "heart_silent", "heart_sender", "heart_drop"):
            getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._heart = library.heart_start(interval_s)

    def add(self, fd: int) -> int:
        return int(self._library.heart_add(self._heart, fd))

    def silent(self, place: int) -> float:
        return float(self._library.heart_silent(self._heart, place))

    def sender(self, place: int) -> int:
        return int(self._library.heart_sender(self._heart, place))

    def drop(self, place: int) -> None:
        self._library.heart_drop(self._heart, place)


class _Link:
    def __init__(self, fd: int) -> None:
        self.sock = socket.socket(fileno=fd)
        self.sock.setblocking(False)
        self.silent, self.sender = 0.0, 0

    def listen_and_beat(self, passed: float) -> None:
        self.silent += passed
        try:
            with suppress(BlockingIOError):
                heard = self.sock.recv(4096)
                if not heard:
                    raise ConnectionResetError
                self.silent, self.sender = 0.0, heard[-1]
            with suppress(BlockingIOError):
                self.sock.send(bytes([_PYTHON]))
        except OSError:
            self.silent = -1.0


class _Threaded:
    """The same by a Python thread."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s, self._lock = interval_s, threading.Lock()
        self._links: dict[int, _Link] = {}
        threading.Thread(target=self._run, name="weft-heart", daemon=True).start()

    def add(self, fd: int) -> int:
        link = _Link(fd)
        with self._lock:
            place = next(place for place in range(len(self._links) + 1) if place not in self._links)
            self._links[place] = link
            link.listen_and_beat(0.0)
        return place

    def silent(self, place: int) -> float:
        return self._links[place].silent

    def sender(self, place: int) -> int:
        return self._links[place].sender

    def drop(self, place: int) -> None:
        with self._lock:
            self._links.pop(place).sock.close()

    def _run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(self._interval_s)
            now = time.monotonic()
            passed, before = min(now - before, 2 * self._interval_s), now
            with self._lock:
                for link in self._links.values():
                    if link.silent >= 0:
                        link.listen_and_beat(passed)
