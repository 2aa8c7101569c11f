"""The side that is asked: requests from whoever holds the key, each that counts served once."""

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

log = logging.getLogger("weft.messaging")

_STRANGERS = 32
"""So many connections may be unproven at once; the next one takes the place of the oldest."""
_WINDOW = 1 << 14
"""Requests of one asker that may be open at once; more are left in the network until some are answered."""
_REMEMBERED = 1 << 16
"""Replies of one asker that may be kept; who never settles so many is sent away."""
_KEPT_S = 120.0
"""How long an asker that went away may come back and find its replies. What it has asked is known for ever."""
_FORGOTTEN = f"this was asked before, and its reply is kept for {_KEPT_S:g} s only; start this process again"
_GOODBYE = "it said goodbye"
_MOST_REPLY = 64 * 1024
"""Replies to requests that count are kept, and so are small."""


@dataclass
class _Session:
    """One asker, over all its connections."""

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
    """The highest number of a request that counts."""
    forgotten: int = 0
    """Up to this number replies are not kept any more."""

    def full(self, max_frame_bytes: int) -> bool:
        """Whether more is open than should be, by number or by bytes."""
        return len(self.open) >= _WINDOW or self.held > 4 * max_frame_bytes


class Request:
    """One request; reply or refuse once, from any thread. Its parts are read-only, and belong to it until then.

    Whoever `keeps` them has them until `release`.
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
        """Which asker's life this is; one that was started again has the same name and another identity."""
        return self._session.identity

    @property
    def verb(self) -> int:
        return self._head.verb

    def reply(self, parts: Sequence[memoryview] = (), *, priority: int = 0) -> None:
        """Parts must not change any more; those of a request that counts are copied, and small."""
        self._server._answer(self._session, self._head, Kind.REPLY, list(parts), priority)

    def release(self) -> None:
        """The parts are not looked at any more."""
        with self._server._lock:
            self._server._give_back(self.parts)

    def refuse(self, why: str) -> None:
        """One sentence instead of an answer."""
        self._server._answer(self._session, self._head, Kind.REFUSAL, [memoryview(why.encode()[:4096])])


class Server:
    """Listens at one address and hands requests to `handle`, in the thread that carries them: it must not wait.

    `joined` and `left` tell of askers that come for the first time, and of those that went (name, reason, identity): on
    purpose, or by a link that broke and was not made anew within `grace_s`, or showed no sign of life for `patience_s`:
    both by default as `WEFT_PEER_TIMEOUT_S` says. `encrypted` and `encrypt_loopback` are as for a client.
    """

    def __init__(
        self,
        address: tuple[str, int],
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
        self._strangers: dict[socket.socket, None] = {}
        prepare()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._closed = False
        self._carrier = Carrier("weft-serve")
        threading.Thread(target=self._welcome, name="weft-door", daemon=True).start()

    def close(self) -> None:
        """Say goodbye to everyone, and stop."""
        self._closed = True
        with self._lock:
            links = [session.link for session in self._sessions.values() if session.link is not None]
        for link in links:
            link.send(Head(Kind.BYE))
        deadline = time.monotonic() + 1
        while any(link.talks and not link.gone for link in links) and time.monotonic() < deadline:
            time.sleep(0.005)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._carrier.close()

    # --- at the door ------------------------------------------------------------------------------------------------

    def _welcome(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # no descriptors left: those who are in go on
                continue
            self._make_room_for(sock)
            threading.Thread(target=self._meet, args=(sock,), name="weft-meeting", daemon=True).start()

    def _make_room_for(self, sock: socket.socket) -> None:
        """Where too many connections are unproven, the oldest ends: an asker with the key is through in no time."""
        with self._lock:
            while len(self._strangers) >= _STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its own thread closes it
            self._strangers[sock] = None

    def _meet(self, sock: socket.socket) -> None:
        try:
            stream, guest = receive(sock, self.key, self._tls, encrypt_loopback=self.encrypt_loopback)
        except (OSError, PeerLost) as error:
            log.info("turned somebody away: %s", error)
            sock.close()
            return
        finally:
            with self._lock:
                self._strangers.pop(sock, None)
        if guest.pulse:
            self._show_life(guest.identity, stream.sock)
            return
        link = Link(stream, guest.name, guest.identity, self, self.patience_s)
        with self._lock:
            self._forget()
            session = self._sessions.get(guest.identity)
            new = session is None
            if session is None:
                session = self._sessions[guest.identity] = _Session(guest.identity, guest.name, link)
            old, session.link = session.link, link
            self._linked.notify_all()
        if old is not None and old is not link:
            self._carrier.part(old)
        if new:
            self._joined(guest.name)
        self._carrier.carry(link)

    def _show_life(self, identity: bytes, sock: socket.socket) -> None:
        """A connection for heartbeats, for the link of the same asker, which was welcomed just before."""

        def bare() -> Link | None:
            session = self._sessions.get(identity)
            return session.link if session and session.link and session.link.pulse is None else None

        with self._linked:
            link = self._linked.wait_for(bare, PATIENCE_S)
        if link is None:
            sock.close()
        else:
            link.attach(Pulse(sock))

    def _forget(self) -> None:
        """Let go of the replies of those who went long ago; what they have asked must never count again."""
        now = time.monotonic()
        for each in self._sessions.values():
            if each.link is None and now - each.left_at > _KEPT_S:
                each.answered.clear()
                each.forgotten = each.highest

    # --- what links tell (in the carrier's thread) ------------------------------------------------------------------

    def place(self, link: Link, head: Head, sizes: Sequence[int]) -> list[memoryview]:
        with self._lock:
            return [memoryview(self._memory(size))[:size] for size in sizes]

    def _memory(self, size: int) -> bytearray:
        """Of a size that is used again: the next power of two."""
        room = 1 << max(6, (size - 1).bit_length())
        spare = self._spare.get(room)
        return spare.pop() if spare else bytearray(room)

    def _give_back(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            memory = part.obj
            if isinstance(memory, bytearray):
                spare = self._spare.setdefault(len(memory), [])
                if len(spare) * len(memory) < 2 * self.max_frame_bytes:
                    spare.append(memory)

    def arrived(self, link: Link, head: Head, parts: list[memoryview]) -> None:
        if head.kind == Kind.BYE:
            raise FrameError(_GOODBYE)
        if head.kind not in REQUESTS:
            raise FrameError(f"a server is not sent {head.kind.name}")
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
                return  # or it came again before it was answered
            if head.kind == Kind.ONCE and head.number <= session.forgotten:
                link.send(Head(Kind.REFUSAL, head.verb, head.number), [memoryview(_FORGOTTEN.encode())])
                return
            if head.kind == Kind.ONCE:
                session.highest = max(session.highest, head.number)
            if len(session.answered) >= _REMEMBERED:
                raise FrameError(f"{_REMEMBERED} replies are not settled")
            request = session.open[head.number] = Request(self, session, head, parts)
            session.held += sum(len(part) for part in parts)
            link.reads = not session.full(self.max_frame_bytes)
        try:
            self.handle(request)
        except Exception:
            log.exception("a request of %s could not be served", session.name)
            with suppress(RuntimeError):
                request.refuse("the server failed at that; its log says how")

    def lost(self, link: Link, reason: str) -> None:
        with self._lock:
            session = self._sessions.get(link.identity)
            if session is None or session.link is not link:
                return
            session.link, session.left_at = None, time.monotonic()
        if reason == _GOODBYE:
            self._left(session.name, reason, session.identity)
        elif not self._closed:
            waiting = threading.Timer(self.grace_s, self._gone_for_good, (session, session.left_at, reason))
            waiting.daemon = True
            waiting.start()

    def _gone_for_good(self, session: _Session, since: float, reason: str) -> None:
        if session.left_at == since and session.link is None and not self._closed:
            self._left(session.name, reason, session.identity)

    def _answer(self, session: _Session, asked: Head, kind: Kind, parts: list[memoryview], priority: int = 0) -> None:
        head = Head(kind, asked.verb, asked.number)
        with self._lock:
            request = session.open.pop(asked.number, None)
            if request is None:
                raise RuntimeError("a request is answered once")
            session.held -= sum(len(part) for part in request.parts)
            if asked.kind == Kind.ONCE:
                if sum(len(part) for part in parts) > _MOST_REPLY:
                    raise ValueError("the reply to a request that counts is kept, and so is small; let it be asked for")
                parts = [memoryview(bytes(part)) for part in parts]
                session.answered[asked.number] = head, parts
            if not request.keeps:
                self._give_back(request.parts)
            link = session.link
            if link is not None and not link.reads and not session.full(self.max_frame_bytes // 2):
                link.reads = True
                self._carrier.wake(link)
        if link is not None:
            link.send(head, parts, priority=priority)
