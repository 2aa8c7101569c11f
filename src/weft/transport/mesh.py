"""Messages between processes over plain TCP: one connection for each pair, one thread for all of them.

A message is its tag, its length and its bytes. Messages of one pair and tag arrive in the order in which they were
sent. A parcel is the set of messages of one call, done when all of them have left and arrived. Connections carry both
directions at once, and little waits in the kernel, so that a message of higher priority is not held up by megabytes.

Every wait is bounded. A peer without a sign of life (see heartbeat) is lost after `patience_s`; a peer that runs, but
neither sends nor reads, after `timeout_s`.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, final

from weft.errors import PeerLost
from weft.transport.heartbeat import Pulse, prepare
from weft.transport.mesh_handshake import Store, connect_all
from weft.transport.parcel import Parcel
from weft.transport.peer import HEADER, Peer, peer_lost
from weft.transport.posted_receives import PostedReceives
from weft.transport.selector_loop import SelectorLoop
from weft.transport.tcp import bound_silence, tune

_WAKE_BYTES = 512 * 1024
"""Bytes of a large message that are read together: a wake-up costs more than its bytes."""


@final
class Mesh(SelectorLoop):
    """The connections of this process to all others."""

    def __init__(
        self,
        process: int,
        processes: int,
        address: str,
        store: Store,
        timeout_s: float,
        patience_s: float | None = None,
    ) -> None:
        """`patience_s`: limit for the silence of a peer that is waited for; None: peers send no heartbeats."""
        if patience_s is not None:
            prepare()
        socks = connect_all(process, processes, address, store)
        pulses = connect_all(process, processes, address, store, "pulse") if patience_s else {}
        super().__init__("weft-mesh")
        self.process, self.timeout_s, self.patience_s = process, timeout_s, patience_s
        self.silent: PeerLost | None = None
        """Set when a peer shows no sign of life: no collective with all peers can complete any more."""
        self._receives = PostedReceives()
        self._lock = threading.Lock()
        self._watched: set[Parcel] = set()
        self._peers: dict[int, Peer] = {}
        for rank, sock in socks.items():
            tune(sock)
            bound_silence(sock, timeout_s)
            peer = self._peers[rank] = Peer(rank, sock, Pulse(pulses[rank]) if rank in pulses else None)
            self._selector.register(sock, selectors.EVENT_READ, peer)
        self._start()

    def post(
        self, sends: Sequence[tuple[int, memoryview]], recvs: Sequence[tuple[int, memoryview]], tag: int
    ) -> Parcel:
        """Send to and receive from processes, by rank. The memory must not be touched before the parcel is done."""
        parcel = Parcel(len(sends) + len(recvs))
        for source, into in recvs:
            self._receives.post(source, tag, into, parcel)
        wake = False
        for to, view in sends:
            peer = self._peers[to]
            finished: list[Parcel] = []
            with peer.lock:
                lost = peer.lost
                if lost is None:
                    peer.outgoing.append(([memoryview(HEADER.pack(tag, len(view))), view], parcel))
                    if len(peer.outgoing) == 1:
                        peer.last_write = time.monotonic()
                        with suppress(OSError):  # the thread finds the connection broken, too, and names the peer
                            finished = peer.write()
                    wake = wake or (bool(peer.outgoing) and peer.events == selectors.EVENT_READ)
            if lost is not None:
                parcel.finish_one(lost)
            for each in finished:
                each.finish_one()
        if wake:
            self._wake()
        return parcel

    def watch(self, future: Any) -> Parcel:
        """A parcel for a collective of another library: done with its future, failed when a peer falls silent."""
        parcel = Parcel(1)
        with self._lock:
            silent = self.silent
            if silent is None:
                self._watched.add(parcel)
        if silent is not None:
            parcel.finish_one(silent)
        future.add_done_callback(lambda _: self._unwatch(parcel))
        return parcel

    def _unwatch(self, parcel: Parcel) -> None:
        with self._lock:
            self._watched.discard(parcel)
        parcel.finish_one()

    def close(self) -> None:
        """Close all connections."""
        if self._closed:
            return
        self._stop()
        for peer in self._peers.values():
            peer.close()
        self._release()

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _ready(self, data: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(data)
            if events & selectors.EVENT_WRITE:
                with data.lock:
                    finished = data.write()
                for parcel in finished:
                    parcel.finish_one()
                if not data.outgoing:
                    self._select_writers()
        except OSError as error:
            self._lose(data, peer_lost(data.rank, error.strerror or type(error).__name__))

    def _after_events(self, woken: bool) -> None:
        if woken:
            self._select_writers()

    def _select_writers(self) -> None:
        """Select connections for writing exactly while they have something to send."""
        for peer in self._peers.values():
            with peer.lock:  # `post` wakes this thread only where a connection is not selected yet
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
                if events != peer.events and peer.sock.fileno() >= 0:
                    peer.events = events
                    with suppress(KeyError):
                        self._selector.modify(peer.sock, events, peer)

    def _read(self, peer: Peer) -> None:
        while True:
            if peer.reading is None:
                left = HEADER.size - peer.header_got
                got = peer.receive(memoryview(peer.header)[peer.header_got :])
                peer.header_got += got
                if got < left:
                    return
                peer.header_got = 0
                peer.tag, size = HEADER.unpack(peer.header)
                peer.reading = self._receives.begin(peer.rank, peer.tag, size)
            message = peer.reading
            left = len(message.into) - message.got
            if left:
                got = peer.receive(message.into[message.got :])
                message.got += got
                if got < left:
                    peer.wake_at(min(left - got, _WAKE_BYTES))
                    return
            peer.reading = None
            peer.wake_at(1)
            self._receives.complete(peer.rank, peer.tag, message)

    def _tick(self, now: float) -> None:
        """End waits that have exceeded their limit, and name the peer."""
        for peer in self._peers.values():
            if peer.reading is not None:
                self._ready(peer, selectors.EVENT_READ)  # fewer bytes than `wake_at` asks for do not wake this thread
            waits = self._waits(peer) if peer.lost is None else {}
            if not waits and not self._watched:
                continue
            limit_s = peer.exceeded_silence_s(self.patience_s, now)
            late = next((reason for reason, since in waits.items() if now - since > self.timeout_s), None)
            if limit_s is not None:
                lost = peer_lost(peer.rank, f"no sign of life for {limit_s:g} s")
                self._lose(peer, lost)
                self._fail_watched(lost)
            elif late is not None:
                self._lose(peer, peer_lost(peer.rank, f"{late} for {self.timeout_s:g} s"))

    def _waits(self, peer: Peer) -> dict[str, float]:
        """What this process waits for from a peer, and the time of the last progress."""
        waits = {}
        posted = self._receives.oldest(peer.rank)
        if posted is not None:
            waits["nothing came"] = posted
        if peer.reading is not None:
            waits["nothing came of the rest of a message"] = peer.last_read
        with peer.lock:
            if peer.outgoing:
                waits["it read nothing of what was sent to it"] = peer.last_write
        return waits

    def _lose(self, peer: Peer, lost: PeerLost) -> None:
        """Fail every parcel that needs this peer, now and later; other peers are not affected."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.sock)
        if self._closed:
            return
        inbound = self._receives.lose(peer.rank, lost)
        if peer.reading is not None:
            inbound.append(peer.reading)
            peer.reading = None
        with peer.lock:
            peer.lost = lost
            parcels = [parcel for _, parcel in peer.outgoing] + [each.parcel for each in inbound if each.parcel]
            peer.outgoing.clear()
        for parcel in parcels:
            parcel.finish_one(lost)

    def _fail_watched(self, lost: PeerLost) -> None:
        with self._lock:
            self.silent = lost
            watched, self._watched = self._watched, set()
        for parcel in watched:
            parcel.finish_one(lost)

    def _failed(self, error: Exception) -> None:
        """End every wait: nothing completes without the thread."""
        failed = PeerLost(f"messages between workers failed in this process: {type(error).__name__}: {error}")
        failed.__cause__ = error
        for peer in self._peers.values():
            self._lose(peer, failed)
        self._fail_watched(failed)
