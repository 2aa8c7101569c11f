"""The server: requests from authenticated clients, ONCE requests served at most once."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from weft.errors import PeerLost
from weft.transport.heartbeat import Pulse, peer_timeout_s, prepare
from weft.transport.messaging.frames import REQUESTS, FrameError, Head, Kind
from weft.transport.messaging.handshake import PATIENCE_S, receive
from weft.transport.messaging.keys import Key
from weft.transport.messaging.links import Carrier, Link
from weft.transport.tcp import Address, bound_address, listen

log = logging.getLogger("weft.messaging")

_MAX_UNAUTHENTICATED = 32
"""Limit for unauthenticated connections; the next one replaces the oldest."""
_WINDOW = 1 << 14
"""Limit for open requests of one client; further ones wait in the network until some have a reply."""
_MAX_REPLIES = 1 << 16
"""Limit for stored replies of one client; the link of a client that never settles them ends."""
_KEPT_S = 120.0
"""How long the replies to a lost client are stored. The numbers of its requests are never forgotten."""
_FORGOTTEN = (
    f"this request was sent before, and its reply is stored for {_KEPT_S:g} s after a lost connection; start this "
    "process again"
)
_CLOSED = "it closed the link"
_MAX_ONCE_REPLY_BYTES = 64 * 1024
"""Limit for the reply to a ONCE request, which is stored."""


@dataclass
class _Session:
    """One client, over all its links."""

    identity: bytes
    name: str
    link: Link | None
    settled: int = 0
    open: dict[int, Request] = field(default_factory=dict)
    held: int = 0
    """Bytes of open requests."""
    answered: dict[int, tuple[Head, list[memoryview]]] = field(default_factory=dict)
    left_at: float = 0.0
    highest: int = 0
    """The highest number of a ONCE request."""
    forgotten: int = 0
    """The replies up to this number are not stored any more."""

    def full(self, max_frame_bytes: int) -> bool:
        """Whether the open requests exceed their limit, in number or in bytes."""
        return len(self.open) >= _WINDOW or self.held > 4 * max_frame_bytes


class Request:
    """One request. Call `reply` or `refuse` once, from any thread.

    Its parts are read-only and valid until then, or with `keeps` set until `release`.
    """

    def __init__(self, server: Server, session: _Session, head: Head, parts: list[memoryview]) -> None:
        self._server, self._session, self._head = server, session, head
        self.parts = parts
        self.keeps = False

    @property
    def sender(self) -> str:
        return self._session.name

    @property
    def identity(self) -> bytes:
        """The identity of the client object: a process that was started again has its old name and a new identity."""
        return self._session.identity

    @property
    def verb(self) -> int:
        return self._head.verb

    def reply(self, parts: Sequence[memoryview] = (), *, priority: int = 0) -> None:
        """Reply. The parts must not change any more; those for a ONCE request are copied, and limited to 64 KiB."""
        self._server._answer(self._session, self._head, Kind.REPLY, list(parts), priority)

    def release(self) -> None:
        """Return the memory of the parts for reuse."""
        with self._server._lock:
            self._server._reuse(self.parts)

    def refuse(self, why: str) -> None:
        """Reply with one sentence, the reason: the client raises Refused."""
        self._server._answer(self._session, self._head, Kind.REFUSAL, [memoryview(why.encode()[:4096])])


class Server:
    """Listens at one address and passes requests to `handle`, in the carrier's thread: it must not block.

    `joined` is called with the name of a new client, `left` with the name, a reason and the identity of a client that
    has closed its link, or whose link broke and was not made again within `grace_s`. A link also breaks when its client
    is silent for `patience_s`. The defaults are 0.4 (`patience_s`) and 0.3 (`grace_s`) of `WEFT_PEER_TIMEOUT_S`.
    `encrypted` and `encrypt_loopback` are those of Client.
    """

    def __init__(
        self,
        address: Address,
        key: Key,
        handle: Callable[[Request], None],
        *,
        encrypted: bool = False,
        encrypt_loopback: bool = True,
        max_frame_bytes: int = 1 << 26,
        patience_s: float | None = None,
        grace_s: float | None = None,
        joined: Callable[[str], None] = lambda name: None,
        left: Callable[[str, str, bytes], None] = lambda name, why, identity: None,
    ) -> None:
        self.key, self.handle, self.max_frame_bytes = key, handle, max_frame_bytes
        self.patience_s = 0.4 * peer_timeout_s() if patience_s is None else patience_s
        self.grace_s = 0.3 * peer_timeout_s() if grace_s is None else grace_s
        self.encrypt_loopback = encrypt_loopback
        self._joined, self._left = joined, left
        self._tls: ssl.SSLContext | None = key.context(server=True) if encrypted else None
        self._sessions: dict[bytes, _Session] = {}
        self._lock = threading.RLock()
        self._linked = threading.Condition(self._lock)
        self._spare: dict[int, list[bytearray]] = {}
        self._unauthenticated: dict[socket.socket, None] = {}
        prepare()
        self._listener = listen(address, backlog=128)
        self.address = bound_address(self._listener)
        self._closed = False
        self._carrier = Carrier("weft-serve")
        threading.Thread(target=self._accept, name="weft-accept", daemon=True).start()

    def close(self) -> None:
        """Close all links and stop listening."""
        self._closed = True
        with self._lock:
            links = [session.link for session in self._sessions.values() if session.link is not None]
        for link in links:
            link.send(Head(Kind.BYE))
        deadline = time.monotonic() + 1
        while any(link.has_unsent and not link.gone for link in links) and time.monotonic() < deadline:
            time.sleep(0.005)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._carrier.close()

    # --- connections ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # no file descriptors are left; existing links go on
                continue
            self._limit_unauthenticated(sock)
            threading.Thread(target=self._authenticate, args=(sock,), name="weft-handshake", daemon=True).start()

    def _limit_unauthenticated(self, sock: socket.socket) -> None:
        """Make room by ending the oldest unauthenticated connection: a client with the key authenticates quickly."""
        with self._lock:
            while len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its own thread closes it
            self._unauthenticated[sock] = None

    def _authenticate(self, sock: socket.socket) -> None:
        try:
            stream, caller = receive(sock, self.key, self._tls, encrypt_loopback=self.encrypt_loopback)
        except (OSError, PeerLost) as error:
            log.info("rejected an unauthenticated connection: %s", error)
            sock.close()
            return
        finally:
            with self._lock:
                self._unauthenticated.pop(sock, None)
        if caller.pulse:
            self._attach_pulse(caller.identity, stream.sock)
            return
        link = Link(stream, caller.name, caller.identity, self, self.patience_s)
        with self._lock:
            self._forget()
            session = self._sessions.get(caller.identity)
            new = session is None
            if session is None:
                session = self._sessions[caller.identity] = _Session(caller.identity, caller.name, link)
            old, session.link = session.link, link
            self._linked.notify_all()
        if old is not None and old is not link:
            self._carrier.replace(old)
        if new:
            self._joined(caller.name)
        self._carrier.carry(link)

    def _attach_pulse(self, identity: bytes, sock: socket.socket) -> None:
        """Attach a connection for heartbeats to the link of the same client, which was authenticated just before."""

        def without_pulse() -> Link | None:
            session = self._sessions.get(identity)
            return session.link if session and session.link and session.link.pulse is None else None

        with self._linked:
            link = self._linked.wait_for(without_pulse, PATIENCE_S)
        if link is None:
            sock.close()
        else:
            link.attach(Pulse(sock))

    def _forget(self) -> None:
        """Discard the replies of clients lost for _KEPT_S. Their ONCE requests are still never served again."""
        now = time.monotonic()
        for each in self._sessions.values():
            if each.link is None and now - each.left_at > _KEPT_S:
                each.answered.clear()
                each.forgotten = each.highest

    # --- as the owner of links, in the carrier's thread -------------------------------------------------------------

    def place(self, link: Link, head: Head, sizes: Sequence[int]) -> list[memoryview]:
        with self._lock:
            return [memoryview(self._memory(size))[:size] for size in sizes]

    def _memory(self, size: int) -> bytearray:
        """Memory of the next power of two, so that it can be reused."""
        capacity = 1 << max(6, (size - 1).bit_length())
        spare = self._spare.get(capacity)
        return spare.pop() if spare else bytearray(capacity)

    def _reuse(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            memory = part.obj
            if isinstance(memory, bytearray):
                spare = self._spare.setdefault(len(memory), [])
                if len(spare) * len(memory) < 2 * self.max_frame_bytes:
                    spare.append(memory)

    def arrived(self, link: Link, head: Head, parts: list[memoryview]) -> None:
        if head.kind == Kind.BYE:
            raise FrameError(_CLOSED)
        if head.kind not in REQUESTS:
            raise FrameError(f"the client sent a {head.kind.name} frame, which servers do not accept")
        with self._lock:
            session = self._sessions.get(link.identity)
            if session is None or session.link is not link:
                return
            if head.settled > session.settled:
                session.settled = head.settled
                for number in [number for number in session.answered if number <= head.settled]:
                    del session.answered[number]
            known = session.answered.get(head.number)
            if known is not None:
                link.send(*known)
                return
            replayed = head.kind == Kind.ONCE and head.number <= session.settled
            if replayed or head.number in session.open:
                return  # sent again before its reply was
            if head.kind == Kind.ONCE and head.number <= session.forgotten:
                link.send(Head(Kind.REFUSAL, head.verb, head.number), [memoryview(_FORGOTTEN.encode())])
                return
            if head.kind == Kind.ONCE:
                session.highest = max(session.highest, head.number)
            if len(session.answered) >= _MAX_REPLIES:
                raise FrameError(f"the client has not settled {_MAX_REPLIES} replies")
            request = session.open[head.number] = Request(self, session, head, parts)
            session.held += sum(len(part) for part in parts)
            link.reads = not session.full(self.max_frame_bytes)
        try:
            self.handle(request)
        except Exception:
            log.exception("the handler failed on a request of %s", session.name)
            with suppress(RuntimeError):
                request.refuse("the server failed on this request; its log has the traceback")

    def lost(self, link: Link, reason: str) -> None:
        with self._lock:
            session = self._sessions.get(link.identity)
            if session is None or session.link is not link:
                return
            session.link, session.left_at = None, time.monotonic()
        if reason == _CLOSED:
            self._left(session.name, reason, session.identity)
        elif not self._closed:
            timer = threading.Timer(self.grace_s, self._report_loss, (session, session.left_at, reason))
            timer.daemon = True
            timer.start()

    def _report_loss(self, session: _Session, since: float, reason: str) -> None:
        if session.left_at == since and session.link is None and not self._closed:
            self._left(session.name, reason, session.identity)

    def _answer(self, session: _Session, to: Head, kind: Kind, parts: list[memoryview], priority: int = 0) -> None:
        head = Head(kind, to.verb, to.number)
        with self._lock:
            request = session.open.pop(to.number, None)
            if request is None:
                raise RuntimeError("a request has one reply, and this one was sent")
            session.held -= sum(len(part) for part in request.parts)
            if to.kind == Kind.ONCE:
                if sum(len(part) for part in parts) > _MAX_ONCE_REPLY_BYTES:
                    raise ValueError(
                        f"the reply to a ONCE request is stored and limited to {_MAX_ONCE_REPLY_BYTES} bytes; let the "
                        "client fetch it with a QUERY"
                    )
                parts = [memoryview(bytes(part)) for part in parts]
                session.answered[to.number] = head, parts
            if not request.keeps:
                self._reuse(request.parts)
            link = session.link
            if link is not None and not link.reads and not session.full(self.max_frame_bytes // 2):
                link.reads = True
                self._carrier.wake(link)
        if link is not None:
            link.send(head, parts, priority=priority)
