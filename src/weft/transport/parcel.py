"""The completion of messages that were posted together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from weft.errors import PeerLost


@final
class Parcel:
    """Messages that were posted together; done when the last of them is, or the first has failed."""

    at_once = False

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._then: Callable[[], None] | None = None
        self._error: PeerLost | None = None
        if count == 0:
            self._done.set()

    def wait(self) -> None:
        """Block until all messages are done. Raises PeerLost where one of them has failed."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` once, when the parcel is done or has failed: immediately where it already is."""
        with self._lock:
            if not self._done.is_set():
                self._then = act
                return
        act()

    def finish_one(self, error: PeerLost | None = None) -> None:
        """Count one message as done. An error ends the whole parcel; later calls then have no effect."""
        with self._lock:
            if self._done.is_set():
                return
            self._left -= 1
            self._error = error
            if self._left and error is None:
                return
            self._done.set()
            act, self._then = self._then, None  # it may refer to this parcel, and a cycle would keep gradients alive
        if act is not None:
            act()
