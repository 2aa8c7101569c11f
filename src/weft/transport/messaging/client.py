"""The client: requests over a link that is made again where it breaks, without losing any of them."""

from __future__ import annotations

import itertools
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from weft.errors import JobError, PeerLost
from weft.transport.heartbeat import Pulse, peer_timeout_s, prepare
from weft.transport.messaging.frames import FrameError, Head, Kind
from weft.transport.messaging.handshake import Caller, SentAway, Stranger, call
from weft.transport.messaging.keys import Key
from weft.transport.messaging.links import Carrier, Link
from weft.transport.tcp import Address, format_address

_PAUSE_S = 0.05
_MAX_FRUITLESS_LINKS = 20
"""Links in a row that may break without having carried a reply."""
_CROWDED_S = 5.0
"""Limit for connecting again to a server that closes connections during the handshake: it may have too many."""


class Refused(JobError):
    """The server refused a request; the message is its reason."""


class Pending:
    """A request without a reply so far."""

    def __init__(
        self,
        to: str,
        head: Head,
        parts: Sequence[memoryview],
        into: Sequence[memoryview] | None,
        priority: int,
        then: Callable[[Pending], None] | None,
    ) -> None:
        self.to, self.head, self.sent, self.into, self.priority = to, head, list(parts), into, priority
        self._then = then
        self.parts: list[memoryview] = []
        self._error: Exception | None = None
        self._done = threading.Event()

    def done(self, within_s: float) -> bool:
        """Whether there is a reply or an error, after waiting `within_s` at most."""
        return self._done.wait(within_s)

    def wait(self, timeout_s: float) -> list[memoryview]:
        """The parts of the reply, in `into` where that was given. Raises PeerLost or Refused."""
        if not self._done.wait(timeout_s):
            raise self.overdue(timeout_s)
        if self._error is not None:
            raise self._error
        return self.parts

    def overdue(self, timeout_s: float) -> PeerLost:
        """The error of a wait that ended without a reply."""
        return PeerLost(f"no reply from the server at {self.to} in {timeout_s:g} s")

    def finish(self, parts: list[memoryview], error: Exception | None = None) -> None:
        """Set the reply or the error. The client calls this once, after it has removed the request from its list."""
        self.parts, self._error, self.sent = parts, error, []
        self._done.set()
        if self._then is not None:
            self._then(self)


class Client:
    """A connection to one server. Requests with a lower `priority` number leave first.

    `encrypted`: within TLS; with `encrypt_loopback` also where both sides are on one machine. Client and server need
    the same values.
    """

    def __init__(
        self,
        address: Address,
        key: Key,
        name: str,
        *,
        encrypted: bool = False,
        encrypt_loopback: bool = True,
        max_frame_bytes: int = 1 << 26,
        patience_s: float | None = None,
        retry_s: float | None = None,
    ) -> None:
        """`patience_s`: limit for the silence of the server; `retry_s`: limit for connecting again after that.

        The defaults are 0.4 and 0.3 of `WEFT_PEER_TIMEOUT_S`.
        """
        self.address, self.key, self.max_frame_bytes, self.encrypt_loopback = (
            address,
            key,
            max_frame_bytes,
            encrypt_loopback,
        )
        self.patience_s = 0.4 * peer_timeout_s() if patience_s is None else patience_s
        self.retry_s = 0.3 * peer_timeout_s() if retry_s is None else retry_s
        self._caller = Caller(secrets.token_bytes(16), name)
        self._tls: ssl.SSLContext | None = key.context(server=False) if encrypted else None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Pending] = {}
        self._settled = 0
        self._failed: Exception | None = None
        self._fruitless_links = 0
        self._closed = False
        prepare()
        self._carrier = Carrier("weft-ask")
        self._link: Link | None = self._call(time.monotonic() + self.retry_s)
        self._carrier.carry(self._link)

    def __str__(self) -> str:
        return format_address(self.address)

    def ask(
        self,
        verb: int,
        parts: Sequence[memoryview] = (),
        *,
        once: bool = False,
        into: Sequence[memoryview] | None = None,
        priority: int = 0,
        then: Callable[[Pending], None] | None = None,
    ) -> Pending:
        """Send a request. Its parts must not change before the reply: they may have to be sent again.

        `once`: the request is never served twice. `into`: memory for the parts of the reply. `then` is called with the
        request when it has a reply or an error, in the carrier's thread.
        """
        with self._lock:
            if self._failed is not None:
                raise self._failed
            number = next(self._numbers)
            head = Head(Kind.ONCE if once else Kind.QUERY, verb, number, self._settled)
            pending = self._open[number] = Pending(str(self), head, parts, into, priority, then)
            link = self._link
        if link is not None:
            link.send(head, pending.sent, priority=priority)
        return pending

    def check(self) -> None:
        """Raise the error that ended this connection for good, if there was one."""
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Close the connection; requests without a reply fail."""
        with self._lock:
            self._closed = True
            link = self._link
        if link is not None:
            link.send(Head(Kind.BYE), priority=1 << 30)
            deadline = time.monotonic() + 1
            while link.has_unsent and not link.gone and time.monotonic() < deadline:
                time.sleep(0.002)
        self._carrier.close()
        self._fail(PeerLost(f"the link to {self} was closed"))

    # --- as the owner of a link, in the carrier's thread ------------------------------------------------------------

    def place(self, link: Link, head: Head, sizes: Sequence[int]) -> list[memoryview]:
        pending = self._open.get(head.number)
        if pending is not None and pending.into is not None and head.kind == Kind.REPLY:
            wanted = sum(len(part) for part in pending.into)
            if wanted != sum(sizes):
                raise FrameError(f"a reply has {sum(sizes)} bytes where there is room for {wanted}")
            return list(pending.into)
        return [memoryview(bytearray(size)) for size in sizes]

    def arrived(self, link: Link, head: Head, parts: list[memoryview]) -> None:
        if head.kind == Kind.BYE:
            raise FrameError("it closed the link")
        if head.kind not in (Kind.REPLY, Kind.REFUSAL):
            raise FrameError(f"the server sent a {head.kind.name} frame, which clients do not accept")
        with self._lock:
            self._fruitless_links = 0
            pending = self._open.pop(head.number, None)
            first = next((number for number, each in self._open.items() if each.head.kind == Kind.ONCE), None)
            self._settled = first - 1 if first is not None else max(self._settled, head.number)
        if pending is None:
            return
        if head.kind == Kind.REFUSAL:
            pending.finish([], Refused(bytes(parts[0]).decode(errors="replace") if parts else "refused"))
        else:
            pending.finish(parts)

    def lost(self, link: Link, reason: str) -> None:
        with self._lock:
            self._link = None
            if self._closed:
                return
            self._fruitless_links += 1
        if self._fruitless_links > _MAX_FRUITLESS_LINKS:
            self._fail(PeerLost(f"the link to {self} broke {self._fruitless_links} times without a reply ({reason})"))
            return
        threading.Thread(target=self._reconnect, args=(reason,), name="weft-reconnect", daemon=True).start()

    def _reconnect(self, reason: str) -> None:
        """Make a new link, then send every request without a reply again."""
        try:
            link = self._call(time.monotonic() + self.retry_s)
        except (OSError, PeerLost) as error:
            refused = f"; then {error}" if isinstance(error, Stranger) else ""
            self._fail(PeerLost(f"the server at {self} went away ({reason}){refused}"))
            return
        with self._lock:
            if self._closed:
                link.stream.close()
                return
            self._link = link
            for number in sorted(self._open):
                pending = self._open[number]
                head = Head(pending.head.kind, pending.head.verb, number, self._settled)
                link.send(head, pending.sent, priority=pending.priority)
        self._carrier.carry(link)

    def _call(self, deadline: float) -> Link:
        """An authenticated link; tries again until the deadline while nothing listens at the address."""
        crowded = min(deadline, time.monotonic() + _CROWDED_S)
        while True:
            left = deadline - time.monotonic()
            try:
                stream = call(
                    self.address,
                    self._caller,
                    self.key,
                    self._tls,
                    max(0.1, left),
                    encrypt_loopback=self.encrypt_loopback,
                )
                link = Link(stream, str(self), self._caller.identity, self, self.patience_s)
                self._attach_pulse(link, max(0.1, deadline - time.monotonic()))
                return link
            except SentAway:
                if time.monotonic() + _PAUSE_S > crowded or self._closed:
                    raise
            except Stranger:
                raise
            except OSError as error:
                if time.monotonic() + _PAUSE_S > deadline or self._closed:
                    raise PeerLost(
                        f"no server answers at {self} ({error.strerror or error}); start it, or correct the address"
                    ) from None
            time.sleep(_PAUSE_S)

    def _attach_pulse(self, link: Link, within_s: float) -> None:
        """Open a connection for heartbeats beside a link. Without it a dead server is noticed later."""
        caller = replace(self._caller, pulse=True)
        with suppress(OSError, PeerLost):
            stream = call(self.address, caller, self.key, self._tls, within_s, encrypt_loopback=self.encrypt_loopback)
            link.attach(Pulse(stream.sock))

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failed = self._failed or error
            opened, self._open = list(self._open.values()), {}
        for pending in opened:
            pending.finish([], error)
