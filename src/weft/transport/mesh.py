"""Messages between processes over plain TCP: one connection for each pair, one thread for all of them.

A message is its tag, its length and its bytes; those of one pair and tag arrive in the order in which they were sent. A
parcel is what one call posts, and done when all of it has left and arrived. What arrives before anybody asked for it is
kept. Links carry both ways at once, and little waits in the kernel, so that what is posted later but sent first is not
held up behind megabytes.

Every wait has an end. A peer without a sign of life (see heartbeat) is given up after `patience_s`; one that lives, but
neither sends nor reads what is waited for, after `timeout_s`.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy

from weft.errors import JobError, PeerLost
from weft.transport.heartbeat import Pulse, prepare

_HEADER = struct.Struct("!QQ")
_HELLO = struct.Struct("!16sI")
_UNSENT = 1024 * 1024
"""Bytes that may wait in a connection's kernel buffer: eight milliseconds at 1 Gbit/s."""
_AT_ONCE = 512 * 1024
"""Of a large message, so much is read at once: fewer wake-ups, which cost more than the bytes."""
_LOOK_S = 0.25
"""How often the thread looks at the clock."""
_KEEPALIVE_S = 30
_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""No message is larger than the memory of a machine."""
_MEETING_S = 120.0
_HELLO_S = 10.0


class Store(Protocol):
    """Where processes leave notes for each other, as c10d's stores do."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


class Parcel:
    """Messages that were posted together."""

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
        """Until all is done; raises PeerLost where somebody went away."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` when it is done, or has failed: at once where it already is."""
        with self._lock:
            if not self._done.is_set():
                self._then = act
                return
        act()

    def _one_done(self, error: PeerLost | None = None) -> None:
        with self._lock:
            if self._done.is_set():
                return
            self._left -= 1
            self._error = error
            if self._left and error is None:
                return
            self._done.set()
            act = self._then
        if act is not None:
            act()


@dataclass
class _Inbound:
    """A message that somebody waits for, or that came before anybody did."""

    into: memoryview
    parcel: Parcel | None
    since: float = 0.0
    got: int = 0


@dataclass
class _Peer:
    """One connection, and what is on its way over it."""

    rank: int
    sock: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)
    outgoing: deque[tuple[list[memoryview], Parcel]] = field(default_factory=deque)
    header: bytearray = field(default_factory=lambda: bytearray(_HEADER.size))
    header_got: int = 0
    reading: _Inbound | None = None
    tag: int = 0
    events: int = selectors.EVENT_READ
    enough: int = 1
    """How much must have arrived before the thread is woken."""
    pulse: Pulse | None = None
    came: float = 0.0
    """When bytes last came."""
    went: float = 0.0
    """When bytes last went, or the first of those that wait to go were handed over."""


class Mesh:
    """This process's connections to all others."""

    def __init__(
        self,
        process: int,
        processes: int,
        address: str,
        store: Store,
        timeout_s: float,
        patience_s: float | None = None,
    ) -> None:
        """`patience_s`: how long a peer may show no sign of life while it is waited for; None: there are no signs."""
        self.process, self.timeout_s, self.patience_s = process, timeout_s, patience_s
        self.silent: PeerLost | None = None
        """Why nobody need be waited for any more: a peer without a sign of life."""
        self._lock = threading.Lock()
        self._expected: dict[tuple[int, int], deque[_Inbound]] = defaultdict(deque)
        self._early: dict[tuple[int, int], deque[memoryview]] = defaultdict(deque)
        self._gone: dict[int, PeerLost] = {}
        self._watched: set[Parcel] = set()
        self._closed = False
        if patience_s is not None:
            prepare()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._peers = {rank: _Peer(rank, sock) for rank, sock in _meet(process, processes, address, store).items()}
        for rank, sock in _meet(process, processes, address, store, "pulse").items() if patience_s else ():
            self._peers[rank].pulse = Pulse(sock)
        for peer in self._peers.values():
            _tune(peer.sock, timeout_s)
            self._selector.register(peer.sock, selectors.EVENT_READ, peer)
        self._checked = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="weft-mesh", daemon=True)
        self._thread.start()

    def post(
        self, sends: Sequence[tuple[int, memoryview]], recvs: Sequence[tuple[int, memoryview]], tag: int
    ) -> Parcel:
        """Send to and receive from processes; memory is left alone until it is done."""
        parcel = Parcel(len(sends) + len(recvs))
        for source, into in recvs:
            self._expect(source, tag, into, parcel)
        wake = False
        for to, view in sends:
            peer = self._peers[to]
            finished: list[Parcel] = []
            with peer.lock:
                gone = self._gone.get(to)
                if gone is None:
                    peer.outgoing.append(([memoryview(_HEADER.pack(tag, len(view))), view], parcel))
                    if len(peer.outgoing) == 1:
                        peer.went = time.monotonic()
                        with suppress(OSError):  # the thread will find the connection broken, and say so
                            finished = self._write(peer)
                    wake = wake or (bool(peer.outgoing) and peer.events == selectors.EVENT_READ)
            if gone is not None:
                parcel._one_done(gone)
            for each in finished:
                each._one_done()
        if wake:
            self._nudge()
        return parcel

    def watch(self, future: Any) -> Parcel:
        """What another library exchanges with all peers: done when its future is, failed when a peer falls silent."""
        parcel = Parcel(1)
        with self._lock:
            silent = self.silent
            if silent is None:
                self._watched.add(parcel)
        if silent is not None:
            parcel._one_done(silent)
        future.add_done_callback(lambda _: self._unwatch(parcel))
        return parcel

    def _unwatch(self, parcel: Parcel) -> None:
        with self._lock:
            self._watched.discard(parcel)
        parcel._one_done()

    def close(self) -> None:
        """Let go of all connections."""
        if self._closed:
            return
        self._closed = True
        self._nudge()
        self._thread.join(timeout=5)
        for peer in self._peers.values():
            peer.sock.close()
            if peer.pulse is not None:
                peer.pulse.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _nudge(self) -> None:
        with suppress(BlockingIOError, OSError):
            self._wake.send(b"\0")

    def _expect(self, source: int, tag: int, into: memoryview, parcel: Parcel) -> None:
        with self._lock:
            early = self._early.get((source, tag))
            kept = early.popleft() if early else None
            gone = self._gone.get(source) if kept is None else None
            if kept is None and gone is None:
                self._expected[source, tag].append(_Inbound(into, parcel, time.monotonic()))
                return
        if kept is not None and len(kept) != len(into):
            gone = _lost(source, _wrong_size(source, len(kept), len(into)))
        elif kept is not None:
            into[:] = kept
        parcel._one_done(gone)

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, events in self._selector.select(_LOOK_S):
                    if key.data is None:
                        with suppress(BlockingIOError):
                            self._woken.recv(4096)
                        self._arm()
                    else:
                        self._serve(key.data, events)
                self._look_at_the_clock()
        except Exception as error:  # nobody is left to wait for a thread that is gone
            failed = PeerLost(f"messages between workers failed in this process: {type(error).__name__}: {error}")
            failed.__cause__ = error
            for peer in self._peers.values():
                self._give_up(peer, failed)
            self._fail_watched(failed)

    def _serve(self, peer: _Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(peer)
            if events & selectors.EVENT_WRITE:
                with peer.lock:
                    finished = self._write(peer)
                for parcel in finished:
                    parcel._one_done()
                if not peer.outgoing:
                    self._arm()
        except OSError as error:
            self._give_up(peer, _lost(peer.rank, error.strerror or type(error).__name__))

    def _arm(self) -> None:
        """Ask to be told when a connection that has something to send can take more."""
        for peer in self._peers.values():
            with peer.lock:  # whoever posts meanwhile sees what is asked for
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
                if events != peer.events and peer.sock.fileno() >= 0:
                    peer.events = events
                    with suppress(KeyError):
                        self._selector.modify(peer.sock, events, peer)

    def _write(self, peer: _Peer) -> list[Parcel]:
        """As much as the connection takes now; returns whose messages have left."""
        finished = []
        while peer.outgoing:
            parts, parcel = peer.outgoing[0]
            try:
                sent = peer.sock.sendmsg(parts)
            except BlockingIOError:
                break
            peer.went = time.monotonic()
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
            else:
                peer.outgoing.popleft()
                finished.append(parcel)
        return finished

    def _read(self, peer: _Peer) -> None:
        while True:
            if peer.reading is None:
                left = _HEADER.size - peer.header_got
                got = self._receive(peer, memoryview(peer.header)[peer.header_got :])
                peer.header_got += got
                if got < left:
                    return
                peer.header_got = 0
                peer.tag, size = _HEADER.unpack(peer.header)
                peer.reading = self._addressee(peer, size)
            message = peer.reading
            left = len(message.into) - message.got
            if left:
                got = self._receive(peer, message.into[message.got :])
                message.got += got
                if got < left:
                    self._wake_at(peer, min(left - got, _AT_ONCE))
                    return
            peer.reading = None
            self._wake_at(peer, 1)
            self._arrived(peer, message)

    def _wake_at(self, peer: _Peer, enough: int) -> None:
        if enough != peer.enough:
            peer.enough = enough
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)

    def _receive(self, peer: _Peer, into: memoryview) -> int:
        try:
            got = peer.sock.recv_into(into)
        except BlockingIOError:
            return 0
        if got == 0:
            raise ConnectionResetError(0, "the connection was closed")
        peer.came = time.monotonic()
        return got

    def _addressee(self, peer: _Peer, size: int) -> _Inbound:
        """Where the message that begins now goes: straight to whoever waits for it, or into memory of its own."""
        with self._lock:
            waiting = self._expected.get((peer.rank, peer.tag))
            message = waiting.popleft() if waiting else None
        if message is None:
            if size > _MEMORY:
                raise OSError(0, f"it announces a message of {size} bytes, more than the memory of this machine")
            room = numpy.empty(size, numpy.uint8)  # takes memory as bytes come
            return _Inbound(memoryview(room), None)  # type: ignore[arg-type]
        if len(message.into) != size:
            peer.reading = message
            raise OSError(0, _wrong_size(peer.rank, size, len(message.into)))
        return message

    def _arrived(self, peer: _Peer, message: _Inbound) -> None:
        if message.parcel is None:
            with self._lock:
                waiting = self._expected.get((peer.rank, peer.tag))
                if not waiting:
                    self._early[peer.rank, peer.tag].append(message.into)
                    return
                asked = waiting.popleft()
            if len(asked.into) != len(message.into):
                peer.reading = asked
                raise OSError(0, _wrong_size(peer.rank, len(message.into), len(asked.into)))
            asked.into[:] = message.into
            message = asked
        assert message.parcel is not None
        message.parcel._one_done()

    def _look_at_the_clock(self) -> None:
        """Every wait is bounded, and says who is missing."""
        now = time.monotonic()
        if now - self._checked < _LOOK_S:
            return
        self._checked = now
        for peer in self._peers.values():
            if peer.reading is not None:
                self._serve(peer, selectors.EVENT_READ)  # a few bytes do not wake this thread (_wake_at)
            waits = self._waits(peer) if peer.rank not in self._gone else {}
            if not waits and not self._watched:
                continue
            limit_s = self._silent_for(peer, now)
            late = next((what for what, since in waits.items() if now - since > self.timeout_s), None)
            if limit_s is not None:
                lost = _lost(peer.rank, f"no sign of life for {limit_s:g} s")
                self._give_up(peer, lost)
                self._fail_watched(lost)
            elif late is not None:
                self._give_up(peer, _lost(peer.rank, f"{late} for {self.timeout_s:g} s"))

    def _waits(self, peer: _Peer) -> dict[str, float]:
        """What this process waits for from a peer, and since when."""
        waits = {}
        with self._lock:
            asked = [queue[0].since for (rank, _), queue in self._expected.items() if queue and rank == peer.rank]
        if asked:
            waits["nothing came"] = min(asked)
        if peer.reading is not None:
            waits["nothing came of the rest of a message"] = peer.came
        with peer.lock:
            if peer.outgoing:
                waits["it read nothing of what was sent to it"] = peer.went
        return waits

    def _silent_for(self, peer: _Peer, now: float) -> float | None:
        """The limit that a peer's silence has passed, if it has; any byte from it is a sign of life."""
        silent_s = peer.pulse.silent_s() if peer.pulse is not None else None
        if peer.pulse is None or silent_s is None or self.patience_s is None:
            return None
        limit_s = peer.pulse.limit_s(self.patience_s)
        return limit_s if min(silent_s, now - peer.came) > limit_s else None

    def _fail_watched(self, lost: PeerLost) -> None:
        with self._lock:
            self.silent = lost
            watched, self._watched = self._watched, set()
        for parcel in watched:
            parcel._one_done(lost)

    def _give_up(self, peer: _Peer, lost: PeerLost) -> None:
        """A peer is gone: whoever waits for it learns so; whoever waits for others goes on as far as they come."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.sock)
        if self._closed:
            return
        with self._lock:
            self._gone[peer.rank] = lost
            queues = [queue for (rank, _), queue in self._expected.items() if rank == peer.rank]
            waiting = [message for queue in queues for message in queue]
            for queue in queues:
                queue.clear()
        if peer.reading is not None:
            waiting.append(peer.reading)
        with peer.lock:
            parcels = [parcel for _, parcel in peer.outgoing] + [each.parcel for each in waiting if each.parcel]
            peer.outgoing.clear()
        for parcel in parcels:
            parcel._one_done(lost)


def _lost(rank: int, reason: str) -> PeerLost:
    return PeerLost(f"worker process {rank} went away in the middle of an exchange ({reason})")


def _wrong_size(rank: int, sent: int, expected: int) -> str:
    return f"worker process {rank} sent {sent} bytes where {expected} were expected"


def _tune(sock: socket.socket, timeout_s: float) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # holds for a peer that lives and does not read, too: so it is the long one
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * timeout_s))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)


def _meet(process: int, processes: int, address: str, store: Store, what: str = "mesh") -> dict[int, socket.socket]:
    """A connection to every other process: each calls those before it, and both show that they know the run's word."""
    if process == 0:
        store.set(f"weft/{what}/word", secrets.token_hex(8))
    word = store.get(f"weft/{what}/word")
    socks: dict[int, socket.socket] = {}
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=processes) as listener:
        listener.settimeout(_MEETING_S)
        store.set(f"weft/{what}/{process}", "{}:{}".format(*listener.getsockname()[:2]))
        try:
            for other in range(process):
                host, port = store.get(f"weft/{what}/{other}").decode().rsplit(":", 1)
                sock = socket.create_connection((host, int(port)), timeout=_MEETING_S)
                sock.sendall(_HELLO.pack(word, process))
                _known(sock, word)
                socks[other] = sock
            while len(socks) < processes - 1:
                sock, _ = listener.accept()
                sock.settimeout(_HELLO_S)
                with suppress(_Stranger, OSError):
                    caller = _known(sock, word)
                    sock.sendall(_HELLO.pack(word, process))
                    socks[caller] = sock
        except (OSError, _Stranger) as error:
            missing = sorted(set(range(processes)) - set(socks) - {process})
            raise JobError(
                f"worker process {process} at {address} cannot be reached by, or cannot reach, {missing}: {error}; "
                "open the ports between the machines, or name the right interface in GLOO_SOCKET_IFNAME"
            ) from None
    return socks


class _Stranger(Exception):
    """Somebody called who is not of this run."""


def _known(sock: socket.socket, word: bytes) -> int:
    """The number of the process at the other end, once it has said the word."""
    said = b""
    while len(said) < _HELLO.size:
        more = sock.recv(_HELLO.size - len(said))
        if not more:
            sock.close()
            raise _Stranger("the other end hung up")
        said += more
    theirs, rank = _HELLO.unpack(said)
    if not hmac.compare_digest(theirs, word):
        sock.close()
        raise _Stranger("somebody called who is not of this run")
    return int(rank)
