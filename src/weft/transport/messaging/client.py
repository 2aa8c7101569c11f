"""The side that asks: requests over a link that is made anew where it breaks, and nothing asked is lost by that."""

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
from weft.transport.messaging.handshake import Guest, SentAway, Stranger, call
from weft.transport.messaging.keys import Key
from weft.transport.messaging.links import Carrier, Link

_PAUSE_S = 0.05
_IN_VAIN = 20
"""Links in a row that may break without having brought a reply."""
_CROWDED_S = 5.0
"""How long a server that ends connections before a proof may be called again: it may have too many callers."""


class Refused(JobError):
    """The server says why it does not do what it was asked."""


class Pending:
    """A request on its way."""

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
        """Whether there is a reply, or never will be."""
        return self._done.wait(within_s)

    def wait(self, timeout_s: float) -> list[memoryview]:
        """The reply's parts: `into` where that was given. Raises PeerLost or Refused."""
        if not self._done.wait(timeout_s):
            raise PeerLost(f"no reply from the server at {self.to} in {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self.parts

    def finish(self, parts: list[memoryview], error: Exception | None = None) -> None:
        """The reply, or why there is none; whoever takes the request off the client's list calls this, once."""
        self.parts, self._error, self.sent = parts, error, []
        self._done.set()
        if self._then is not None:
            self._then(self)


class Client:
    """One server, asked by one asker. Requests of a higher urgency (a lower number) leave first.

    `encrypted`: within TLS; with `encrypt_loopback` also where both are on one machine. Both sides must say the same.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: Key,
        name: str,
        *,
        encrypted: bool = False,
        encrypt_loopback: bool = True,
        max_frame_bytes: int = 1 << 26,
        patience_s: float | None = None,
        retry_s: float | None = None,
    ) -> None:
        """`patience_s`: how long the server may show no sign of life; `retry_s`: how long it is then called anew.

        Both by default as `WEFT_PEER_TIMEOUT_S` says.
        """
        self.address, self.key, self.max_frame_bytes, self.encrypt_loopback = (
            address,
            key,
            max_frame_bytes,
            encrypt_loopback,
        )
        self.patience_s = 0.4 * peer_timeout_s() if patience_s is None else patience_s
        self.retry_s = 0.3 * peer_timeout_s() if retry_s is None else retry_s
        self._guest = Guest(secrets.token_bytes(16), name)
        self._tls: ssl.SSLContext | None = key.context(server=False) if encrypted else None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Pending] = {}
        self._settled = 0
        self._failed: Exception | None = None
        self._in_vain = 0
        self._closed = False
        prepare()
        self._carrier = Carrier("weft-ask")
        self._link: Link | None = self._call(time.monotonic() + self.retry_s)
        self._carrier.carry(self._link)

    def __str__(self) -> str:
        return "{}:{}".format(*self.address)

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
        """Send a request. Parts must not change before its reply is there: it may have to be sent again.

        `once`: it counts, and is never served twice. `into`: memory for the reply, one piece behind the other. `then`
        is called when it is there, or never will be, in the thread that carries the link.
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
        """Raise why nothing more can be asked here, if so."""
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Leave; what is still open fails."""
        with self._lock:
            self._closed = True
            link = self._link
        if link is not None:
            link.send(Head(Kind.BYE), priority=1 << 30)
            deadline = time.monotonic() + 1
            while link.talks and not link.gone and time.monotonic() < deadline:
                time.sleep(0.002)
        self._carrier.close()
        self._fail(PeerLost(f"the link to {self} was closed"))

    # --- what the link tells (in the carrier's thread) --------------------------------------------------------------

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
            raise FrameError("it said goodbye")
        if head.kind not in (Kind.REPLY, Kind.REFUSAL):
            raise FrameError(f"an asker is not sent {head.kind.name}")
        with self._lock:
            self._in_vain = 0
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
            self._in_vain += 1
        if self._in_vain > _IN_VAIN:
            self._fail(PeerLost(f"the link to {self} broke {self._in_vain} times without a reply ({reason})"))
            return
        threading.Thread(target=self._again, args=(reason,), name="weft-call-again", daemon=True).start()

    def _again(self, reason: str) -> None:
        """Call until somebody answers, then say again whatever has no reply."""
        try:
            link = self._call(time.monotonic() + self.retry_s)
        except (OSError, PeerLost) as error:
            refused = f"; then {error}" if isinstance(error, Stranger) else ""  # one that goes hangs up on callers
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
        """A link, as soon as the server answers."""
        crowded = min(deadline, time.monotonic() + _CROWDED_S)
        while True:
            left = deadline - time.monotonic()
            try:
                stream = call(
                    self.address,
                    self._guest,
                    self.key,
                    self._tls,
                    max(0.1, left),
                    encrypt_loopback=self.encrypt_loopback,
                )
                link = Link(stream, str(self), self._guest.identity, self, self.patience_s)
                self._show_life(link, max(0.1, deadline - time.monotonic()))
                return link
            except SentAway:
                if time.monotonic() + _PAUSE_S > crowded or self._closed:
                    raise
            except Stranger:
                raise
            except OSError as error:
                if time.monotonic() + _PAUSE_S > deadline or self._closed:
                    raise PeerLost(
                        f"nobody answers at {self} ({error.strerror or error}); start the server, or give its address"
                    ) from None
            time.sleep(_PAUSE_S)

    def _show_life(self, link: Link, within_s: float) -> None:
        """A connection for heartbeats beside a link, which is good without one, only given up later."""
        guest = replace(self._guest, pulse=True)
        with suppress(OSError, PeerLost):
            stream = call(self.address, guest, self.key, self._tls, within_s, encrypt_loopback=self.encrypt_loopback)
            link.attach(Pulse(stream.sock))

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failed = self._failed or error
            opened, self._open = list(self._open.values()), {}
        for pending in opened:
            pending.finish([], error)
