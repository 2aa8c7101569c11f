"""Links: frames over authenticated connections, all links of a client or server carried by one thread."""

from __future__ import annotations

import heapq
import itertools
import logging
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, final

from weft.transport.heartbeat import WITHOUT_NATIVE_S, Pulse
from weft.transport.messaging.frames import HEAD_BYTES, FrameError, Head, Kind, unpack, unpack_sizes
from weft.transport.messaging.streams import Stream
from weft.transport.selector_loop import SelectorLoop

log = logging.getLogger("weft.messaging")

BEAT_S = 1.0
"""Interval at which an idle link sends a BEAT frame."""
_TURN_BYTES = 4 << 20
"""Bytes that are read from one link before the other links are served."""


class Owner(Protocol):
    """The client or server that a link belongs to. The carrier's thread calls it, so no method may block."""

    max_frame_bytes: int

    def place(self, link: Link, head: Head, sizes: Sequence[int]) -> list[memoryview]:
        """Memory for the parts of a frame, before they arrive."""

    def arrived(self, link: Link, head: Head, parts: list[memoryview]) -> None:
        """A frame is complete. Raises FrameError where the link must end."""

    def lost(self, link: Link, reason: str) -> None:
        """The link has ended."""


@final
class Link:
    """One authenticated connection to one peer."""

    def __init__(self, stream: Stream, peer: str, identity: bytes, owner: Owner, patience_s: float) -> None:
        self.stream, self.peer, self.identity, self.owner, self.patience_s = stream, peer, identity, owner, patience_s
        self.reads = True
        """Whether frames are read; while not, they wait in the network."""
        self.gone = self.replaced = False
        self.carrier: Carrier | None = None
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, list[memoryview]]] = []
        self._order = itertools.count()
        self._leaving: list[memoryview] = []
        self._head = bytearray(HEAD_BYTES)
        self._frame: Head | None = None
        self._into: list[memoryview] = [memoryview(self._head)]
        self._parts: list[memoryview] | None = None
        self._sizes = bytearray()
        self.last_read = self.last_write = time.monotonic()
        self.pulse: Pulse | None = None

    def attach(self, pulse: Pulse) -> None:
        """Detect a dead peer by these heartbeats from now on: they do not need the peer's interpreter lock."""
        with self._lock:
            if not self.gone:
                self.pulse = pulse
                return
        pulse.close()

    def send(self, head: Head, parts: Sequence[memoryview] = (), *, priority: int = 0) -> None:
        """Queue a frame; lower priorities leave first. Its parts must not change any more."""
        whole = [memoryview(head.pack([len(part) for part in parts])), *(part for part in parts if len(part))]
        with self._lock:
            if not self.gone:
                heapq.heappush(self._waiting, (priority, next(self._order), whole))
        if self.carrier is not None:
            self.carrier.wake(self)

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._leaving) or self.stream.unsent or bool(self._waiting)

    # --- in the carrier's thread ------------------------------------------------------------------------------------

    def write(self) -> None:
        """Send as much as the connection takes."""
        while True:
            if not self._leaving:
                with self._lock:
                    if self._waiting:
                        _, _, self._leaving = heapq.heappop(self._waiting)
            if not self._leaving:
                self.stream.write(())
                return
            taken = self.stream.write(self._leaving)
            if not taken:
                return
            self.last_write = time.monotonic()
            while self._leaving and taken >= len(self._leaving[0]):
                taken -= len(self._leaving.pop(0))
            if self._leaving:
                self._leaving[0] = self._leaving[0][taken:]

    def abandon(self) -> None:
        """Discard all frames that wait to be sent, now and later."""
        with self._lock:
            self.gone = True
            self._waiting, self._leaving = [], []
            pulse, self.pulse = self.pulse, None
        if pulse is not None:
            pulse.close()

    def read(self) -> bool:
        """Read what has arrived, up to _TURN_BYTES; returns whether there may be more."""
        left = _TURN_BYTES
        while self.reads:
            while self._into:
                if left <= 0:
                    return True
                got = self.stream.read(self._into[0][:left]) if len(self._into[0]) else 0
                left -= got
                if got:
                    self.last_read = time.monotonic()
                if got < len(self._into[0]):
                    self._into[0] = self._into[0][got:]
                    if got == 0 or left > 0:
                        return False
                else:
                    self._into.pop(0)
            self._stage()
        return False

    def _stage(self) -> None:
        """Go on to the next stage of a frame: its head, the sizes of its parts, its parts."""
        if self._frame is None:
            self._frame, count = unpack(self._head)
            self._sizes = bytearray(8 * count)
            self._into = [memoryview(self._sizes)]
        elif self._parts is None:
            sizes = unpack_sizes(self._sizes, self.owner.max_frame_bytes)
            self._parts = self.owner.place(self, self._frame, sizes)
            self._into = [part for part in self._parts if len(part)]
        else:
            head, parts = self._frame, self._parts
            self._frame, self._parts, self._into = None, None, [memoryview(self._head)]
            if head.kind != Kind.BEAT:
                self.owner.arrived(self, head, parts)

    def check_silence(self, now: float) -> None:
        """Send a BEAT frame where the link is idle. Raises FrameError where the peer has been silent for too long."""
        silent_s, limit_s = now - self.last_read if self.reads else 0.0, max(self.patience_s, WITHOUT_NATIVE_S)
        pulse = self.pulse
        if pulse is not None and (quiet_s := pulse.silent_s()) is not None:
            silent_s, limit_s = min(now - self.last_read, quiet_s), pulse.limit_s(self.patience_s)
        if silent_s > limit_s:
            raise FrameError(f"nothing came for {limit_s:g} s")
        if now - self.last_write > BEAT_S and not self.has_unsent:
            self.send(Head(Kind.BEAT))


@final
class Carrier(SelectorLoop):
    """The thread that carries the bytes of all links of a client or server."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lock = threading.Lock()
        self._changed: set[Link] = set()
        self._links: set[Link] = set()
        self._start()

    def carry(self, link: Link) -> None:
        """Take over a link."""
        link.carrier = self
        self.wake(link)

    def wake(self, link: Link) -> None:
        """Serve a link soon: it has something to send, or wants to read again. From any thread."""
        with self._lock:
            first = not self._changed
            self._changed.add(link)
        if first:
            self._wake()

    def replace(self, link: Link) -> None:
        """End a link, from any thread, because its client has made another."""
        link.replaced = True
        self.wake(link)

    def close(self) -> None:
        """Close all links."""
        if self._closed:
            return
        self._stop()
        for link in self._links:
            link.stream.close()
            link.abandon()
        self._release()

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _ready(self, data: Link, events: int) -> None:
        if data not in self._links:
            return
        if events & selectors.EVENT_READ:
            self._guarded(data, partial(self._read, data))
        if events & selectors.EVENT_WRITE:
            self._guarded(data, data.write)
        if data in self._links:
            self._select(data, selectors.EVENT_READ * data.reads | selectors.EVENT_WRITE * data.has_unsent)

    def _after_events(self, woken: bool) -> None:
        with self._lock:
            changed, self._changed = self._changed, set()
        for link in (link for link in changed if not link.gone):
            if link not in self._links:
                self._links.add(link)
                self._selector.register(link.stream.sock, selectors.EVENT_READ, link)
            if link.replaced:
                self._drop(link, "another link took its place")
            self._ready(link, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _tick(self, now: float) -> None:
        for link in list(self._links):
            self._guarded(link, partial(link.check_silence, now))

    def _failed(self, error: Exception) -> None:
        raise error  # errors of links are contained in _guarded: this one is a defect for the thread's excepthook

    def _read(self, link: Link) -> None:
        if link.read():
            self.wake(link)  # bytes that TLS has already taken from the socket wake no selector

    def _select(self, link: Link, wanted: int) -> None:
        """Select a link for the events that can be served now."""
        known = self._selector.get_map().get(link.stream.sock)
        if known is None and wanted:
            self._selector.register(link.stream.sock, wanted, link)
        elif known is not None and not wanted:
            self._selector.unregister(link.stream.sock)
        elif known is not None and known.events != wanted:
            self._selector.modify(link.stream.sock, wanted, link)

    def _drop(self, link: Link, reason: str) -> None:
        if link not in self._links:
            return
        self._links.discard(link)
        with suppress(KeyError, ValueError):
            self._selector.unregister(link.stream.sock)
        link.stream.close()
        link.abandon()
        link.owner.lost(link, reason)

    def _guarded(self, link: Link, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:  # FrameError and ssl's errors among them
            self._drop(link, str(error) or type(error).__name__)
        except Exception as error:  # a defect of one owner must not end the other links
            log.exception("the link to %s failed", link.peer)
            self._drop(link, f"{type(error).__name__}: {error}")
