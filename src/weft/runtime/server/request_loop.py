"""The loop of a server process: one thread serves requests, in the order of their arrival.

The threads of the messaging layer only queue requests and losses, so services need no locks.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from weft.runtime.server.statistics import Statistics
from weft.threads import start_serial_thread
from weft.transport.messaging import Key, Request, Server

log = logging.getLogger(__name__)

_MAX_WARNINGS = 10
_PER_S = 60.0
_MAX_REASON_CHARS = 500


@dataclass(frozen=True)
class Loss:
    """A lost worker."""

    name: str
    reason: str
    identity: bytes = b""
    """The identity of the process, among all processes of this name."""


Inbox = queue.SimpleQueue[Request | Loss | Callable[[], None] | None]
"""The events that a loop serves: requests, lost clients, calls of other threads; None ends it."""


class RequestLoop:
    """A listening server whose requests one thread serves, until closed.

    `serve` replies to a request. A request for which it raises is refused, and `refused` is called with the reason: a
    bad request must not stop the service of others. `lost` is called for clients that have left or were lost. All three
    are called in the loop's thread, as are the calls in `inbox`. The other options are those of `Server`.
    """

    def __init__(
        self,
        inbox: Inbox,
        address: tuple[str, int],
        key: Key,
        *,
        name: str,
        serve: Callable[[Request], None],
        lost: Callable[[Loss], None],
        refused: Callable[[Request, str], None] = lambda request, why: None,
        statistics: Statistics,
        max_frame_bytes: int,
        encrypted: bool = False,
        encrypt_loopback: bool = True,
        patience_s: float | None = None,
    ) -> None:
        self._inbox, self._serve, self._lost, self._refused = inbox, serve, lost, refused
        self._statistics, self._warnings = statistics, RefusalWarnings()
        self._server = Server(
            address,
            key,
            inbox.put,
            encrypted=encrypted,
            encrypt_loopback=encrypt_loopback,
            max_frame_bytes=max_frame_bytes,
            patience_s=patience_s,
            left=lambda name, why, identity: inbox.put(Loss(name, why, identity)),
        )
        self.address = self._server.address
        self._thread = start_serial_thread(self._run, name)

    def close(self) -> None:
        """Stop serving."""
        self._inbox.put(None)
        self._thread.join(timeout=5)
        self._server.close()
        self._warnings.close()

    def _run(self) -> None:
        while (event := self._inbox.get()) is not None:
            self._statistics.depths[self._inbox.qsize()] += 1
            match event:
                case Request():
                    try:
                        self._serve(event)
                    except Exception as error:
                        self._refuse(event, f"the request cannot be served: {error}")
                case Loss():
                    self._lost(event)
                case call:
                    call()

    def _refuse(self, request: Request, why: str) -> None:
        self._warnings.add(request.sender, why)
        with suppress(RuntimeError):  # the request may have been answered already
            request.refuse(why)
        self._refused(request, why)


class RefusalWarnings:
    """Logs refused requests, 10 in a minute at most: a process with the key can send any number of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: deque[float] = deque(maxlen=_MAX_WARNINGS)
        self._omitted = 0

    def add(self, sender: str, why: str) -> None:
        now = self._clock()
        if len(self._logged_at) == _MAX_WARNINGS and now - self._logged_at[0] < _PER_S:
            self._omitted += 1
            return
        self._logged_at.append(now)
        self.close()
        log.warning("a request of %s is refused: %s", sender, why[:_MAX_REASON_CHARS])

    def close(self) -> None:
        """Log the number of refusals that were left out, if there are any."""
        if self._omitted:
            log.warning("%d more requests were refused", self._omitted)
        self._omitted = 0
