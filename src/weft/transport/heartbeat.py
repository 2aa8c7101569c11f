"""Signs of life between processes, which do not need Python's interpreter lock.

A job may hold the lock for a minute (a large `pickle.load`, a sort, an extension that never lets go), and no Python
thread of its process speaks meanwhile. So a thread of heartbeat.cpp sends one byte each interval over a connection of
its own to each peer, and counts how long each has been silent. SIGSTOP, a frozen machine and a cut cable stop it, the
lock does not. Without a compiler a Python thread does the same; a beat says which kind its sender is, and a sender in
Python may be silent for `WITHOUT_NATIVE_S` seconds.

A heartbeat proves nothing but that bytes arrive. Its connection is opened with the same proof as the one that carries
data (messaging: the run's key, within TLS where the network is not trusted; the mesh: the run's word), and carries
nothing else afterwards, outside of TLS. Who can write to the network in between can make a dead process look
alive until `WEFT_TIMEOUT_S`, or cut the connection, which he could do to any connection; he learns nothing, and no
byte of it is ever interpreted.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from weft.errors import UserError
from weft.kernels.build import load

WITHOUT_NATIVE_S = 60.0
"""How long a peer may be silent whose heartbeats need the interpreter lock."""
_SOURCE = Path(__file__).with_name("heartbeat.cpp")
_FLAGS = ["-O2", "-std=c++17", "-shared", "-fPIC", "-pthread"]
_TCP_THIN_LINEAR_TIMEOUTS = 16
_PYTHON = 2
"""What a beat says of its sender; heartbeat.cpp has the other."""


def seconds(name: str, default: float, env: Mapping[str, str] = os.environ) -> float:
    """An environment variable that says how long something may take."""
    try:
        value = float(env.get(name) or default)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise UserError(f"{name} is '{env[name]}', but must be a number of seconds above 0, as in {default:g}")
    return value


def peer_timeout_s(env: Mapping[str, str] = os.environ) -> float:
    """How long it may take until a peer that shows no sign of life is named."""
    return seconds("WEFT_PEER_TIMEOUT_S", 5.0, env)


class Pulse:
    """One connection over which two processes show each other that they run."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":  # on a crowded link a lost beat is sent again every 0.2 s, not ever more seldom
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)
        self._heart = _heart(os.getpid())
        self._place = self._heart.add(sock.detach())
        self._closed = False

    def silent_s(self) -> float | None:
        """Seconds since the last sign of life, as far as this process itself ran; None: the connection has ended."""
        silent = -1.0 if self._closed else self._heart.silent(self._place)
        return None if silent < 0 else silent

    def limit_s(self, patience_s: float) -> float:
        """How long the peer may be silent."""
        slow = not self._closed and self._heart.sender(self._place) == _PYTHON
        return max(patience_s, WITHOUT_NATIVE_S) if slow else patience_s

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._heart.drop(self._place)


def prepare() -> None:
    """Do what takes long, a compilation, before a peer counts on heartbeats."""
    _heart(os.getpid())


class _Heart(Protocol):
    """What beats for all connections of a process."""

    def add(self, fd: int) -> int: ...
    def silent(self, place: int) -> float: ...
    def sender(self, place: int) -> int: ...
    def drop(self, place: int) -> None: ...


@functools.cache
def _heart(pid: int) -> _Heart:
    """This process's; a fork has one of its own."""
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
