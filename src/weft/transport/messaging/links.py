"""Links: frames over authenticated connections, all of a process's carried by one thread."""

from __future__ import annotations

import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from weft.transport.heartbeat import WITHOUT_NATIVE_S, Pulse
from weft.transport.messaging.frames import HEAD_BYTES, FrameError, Head, Kind, unpack, unpack_sizes
from weft.transport.messaging.streams import Stream

log = logging.getLogger("weft.messaging")

BEAT_S = 1.0
"""A link that has nothing to say says so, this often."""
_LOOK_S = 0.25
"""How often the thread looks at the clock."""
_TURN_BYTES = 4 << 20
"""So much is read from one link before others have their turn."""


class Owner(Protocol):
    """Who a link belongs to. All of this is called by the carrier's thread, and must not wait."""

    max_frame_bytes: int

    def place(self, link: Link, head: Head, sizes: Sequence[int]) -> list[memoryview]:
        """Memory for the parts of a frame that begins to arrive."""

    def arrived(self, link: Link, head: Head, parts: list[memoryview]) -> None: ...
    def lost(self, link: Link, reason: str) -> None: ...


class Link:
    """One connection to one peer, whose key was checked."""

    def __init__(self, stream: Stream, peer: str, identity: bytes, owner: Owner, patience_s: float) -> None:
        self.stream, self.peer, self.identity, self.owner, self.patience_s = stream, peer, identity, owner, patience_s
        self.reads = True
        """Whether frames are wanted now; where not, they wait in the network."""
        self.gone = self.parting = False
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
        self.heard = self.spoke = time.monotonic()
        self.pulse: Pulse | None = None

    def attach(self, pulse: Pulse) -> None:
        """From now on these heartbeats say whether the peer lives, whatever its Python threads do."""
        with self._lock:
            if not self.gone:
                self.pulse = pulse
                return
        pulse.close()

    def send(self, head: Head, parts: Sequence[memoryview] = (), *, priority: int = 0) -> None:
        """Hand over a frame; lower priorities leave first. Its parts must not change any more."""
        whole = [memoryview(head.pack([len(part) for part in parts])), *(part for part in parts if len(part))]
        with self._lock:
            if not self.gone:
                heapq.heappush(self._waiting, (priority, next(self._order), whole))
        if self.carrier is not None:
            self.carrier.wake(self)

    @property
    def talks(self) -> bool:
        """Whether something waits to leave."""
        return bool(self._leaving) or self.stream.unsent or bool(self._waiting)

    # --- in the carrier's thread ------------------------------------------------------------------------------------

    def write(self) -> None:
        """As much as the connection takes."""
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
            self.spoke = time.monotonic()
            while self._leaving and taken >= len(self._leaving[0]):
                taken -= len(self._leaving.pop(0))
            if self._leaving:
                self._leaving[0] = self._leaving[0][taken:]

    def abandon(self) -> None:
        """Nothing more leaves."""
        with self._lock:
            self.gone = True
            self._waiting, self._leaving = [], []
            pulse, self.pulse = self.pulse, None
        if pulse is not None:
            pulse.close()

    def read(self) -> bool:
        """What has come, up to one turn's worth; returns whether there may be more."""
        left = _TURN_BYTES
        while self.reads:
            while self._into:
                if left <= 0:
                    return True
                got = self.stream.read(self._into[0][:left]) if len(self._into[0]) else 0
                left -= got
                if got:
                    self.heard = time.monotonic()
                if got < len(self._into[0]):
                    self._into[0] = self._into[0][got:]
                    if got == 0 or left > 0:
                        return False
                else:
                    self._into.pop(0)
            self._stage()
        return False

    def _stage(self) -> None:
        """What was waited for is there: a head, then sizes, then parts."""
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

    def look_at_the_clock(self, now: float) -> None:
        """Speak where there was silence; give up who is silent."""
        silent_s, limit_s = now - self.heard if self.reads else 0.0, max(self.patience_s, WITHOUT_NATIVE_S)
        pulse = self.pulse
        if pulse is not None and (quiet_s := pulse.silent_s()) is not None:
            silent_s, limit_s = min(now - self.heard, quiet_s), pulse.limit_s(self.patience_s)
        if silent_s > limit_s:
            raise FrameError(f"nothing came for {limit_s:g} s")
        if now - self.spoke > BEAT_S and not self.talks:
            self.send(Head(Kind.BEAT))


class Carrier:
    """The thread that moves all links' bytes."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._news: set[Link] = set()
        self._links: set[Link] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def carry(self, link: Link) -> None:
        """Take a link over."""
        link.carrier = self
        self.wake(link)

    def wake(self, link: Link) -> None:
        """Something about this link has changed."""
        with self._lock:
            first = not self._news
            self._news.add(link)
        if first:
            with suppress(BlockingIOError, OSError):
                self._wake.send(b"\0")

    def part(self, link: Link) -> None:
        """Break a link, from any thread."""
        link.parting = True
        self.wake(link)

    def drop(self, link: Link, reason: str) -> None:
        """Break a link; in the carrier's thread."""
        if link not in self._links:
            return
        self._links.discard(link)
        with suppress(KeyError, ValueError):
            self._selector.unregister(link.stream.sock)
        link.stream.close()
        link.abandon()
        link.owner.lost(link, reason)

    def close(self) -> None:
        """Let go of all links."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join(timeout=5)
        for link in self._links:
            link.stream.close()
            link.abandon()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _run(self) -> None:
        checked = time.monotonic()
        while not self._closed:
            for key, events in self._selector.select(_LOOK_S):
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._woken.recv(4096)
                else:
                    self._serve(key.data, events)
            with self._lock:
                news, self._news = self._news, set()
            for link in (link for link in news if not link.gone):
                if link not in self._links:
                    self._links.add(link)
                    self._selector.register(link.stream.sock, selectors.EVENT_READ, link)
                if link.parting:
                    self.drop(link, "another link took its place")
                self._serve(link, selectors.EVENT_READ | selectors.EVENT_WRITE)
            now = time.monotonic()
            if now - checked > _LOOK_S:
                checked = now
                for link in list(self._links):
                    self._guarded(link, partial(link.look_at_the_clock, now))

    def _serve(self, link: Link, events: int) -> None:
        if link not in self._links:
            return
        if events & selectors.EVENT_READ:
            self._guarded(link, partial(self._read, link))
        if events & selectors.EVENT_WRITE:
            self._guarded(link, link.write)
        if link in self._links:
            wanted = selectors.EVENT_READ * link.reads | selectors.EVENT_WRITE * link.talks
            self._listen(link, wanted)

    def _read(self, link: Link) -> None:
        if link.read():
            self.wake(link)  # what TLS has taken from the socket already is announced by nobody else

    def _listen(self, link: Link, wanted: int) -> None:
        """Ask to be told what is worth knowing about a link."""
        known = self._selector.get_map().get(link.stream.sock)
        if known is None and wanted:
            self._selector.register(link.stream.sock, wanted, link)
        elif known is not None and not wanted:
            self._selector.unregister(link.stream.sock)
        elif known is not None and known.events != wanted:
            self._selector.modify(link.stream.sock, wanted, link)

    def _guarded(self, link: Link, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:  # FrameError and ssl's errors among them
            self.drop(link, str(error) or type(error).__name__)
        except Exception as error:  # whatever an owner does wrong: the other links go on
            log.exception("a link to %s failed", link.peer)
            self.drop(link, f"{type(error).__name__}: {error}")
