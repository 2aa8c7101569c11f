"""A selector that other threads can wake, run by one thread: the I/O loop of the mesh and of messaging."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

TICK_S = 0.25
"""Interval at which time limits are checked."""
_JOIN_S = 5.0


class SelectorLoop(ABC):
    """Non-blocking sockets, served by one daemon thread.

    A subclass registers its sockets with `_selector`, each with data that is not None, and calls `_start` when it is
    complete. The hooks below run in the thread and must not block; `_wake` may be called by any thread.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        for end in (self._wake_out, self._wake_in):
            end.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _ready(self, data: Any, events: int) -> None:
        """The socket that was registered with `data` can be read or written."""

    @abstractmethod
    def _after_events(self, woken: bool) -> None:
        """All sockets that were ready have been served; `woken`: `_wake` was called since the last time."""

    @abstractmethod
    def _tick(self, now: float) -> None:
        """TICK_S or more have passed since the last tick; `now` is a time of `time.monotonic`."""

    @abstractmethod
    def _failed(self, error: Exception) -> None:
        """A hook has raised; the thread ends after this."""

    def _start(self) -> None:
        self._thread.start()

    def _wake(self) -> None:
        """Make the thread return from `select`. A full pipe is as good: the thread has not read it yet."""
        with suppress(BlockingIOError, OSError):
            self._wake_out.send(b"\0")

    def _stop(self) -> None:
        """End the thread. Call this once, then `_release` when the subclass has closed its sockets."""
        self._closed = True
        self._wake()
        self._thread.join(timeout=_JOIN_S)

    def _release(self) -> None:
        """Close the selector and the wake-up pipe."""
        self._selector.close()
        self._wake_out.close()
        self._wake_in.close()

    def _run(self) -> None:
        checked = time.monotonic()
        try:
            while not self._closed:
                woken = False
                for key, events in self._selector.select(TICK_S):
                    if key.data is None:
                        woken = True
                        with suppress(BlockingIOError):
                            self._wake_in.recv(4096)
                    else:
                        self._ready(key.data, events)
                self._after_events(woken)
                now = time.monotonic()
                if now - checked >= TICK_S:
                    checked = now
                    self._tick(now)
        except Exception as error:
            self._failed(error)
