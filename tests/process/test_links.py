"""Links that break: peers are named, and what counts is served once."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.process.message_ledger import ADD, ECHO, HERE, NEVER, WAIT_S, Ledger, serving, view
from weft.errors import PeerLost
from weft.transport.messaging import Client, Key, Refused, Request, Server
from weft.transport.messaging.frames import HEAD_BYTES, Head, Kind, unpack
from weft.transport.messaging.handshake import Caller, call
from weft.transport.messaging.links import Link

# --- links that break -------------------------------------------------------------------------------------------------


def test_idle_links_stay(key: Key) -> None:
    with serving(Ledger(), key, patience_s=2.0) as server:
        asker = Client(server.address, key, "worker 0", patience_s=2.0)
        link = asker._link
        time.sleep(3.5)
        asker.ask(ECHO).wait(WAIT_S)
        assert asker._link is link
        asker.close()


def test_one_link_leaves_others_their_turn() -> None:
    class Endless:
        """A stream that brings heartbeats faster than anybody reads."""

        frame = Head(Kind.BEAT).pack([])
        taken = 0
        unsent = False
        sock = socket.socket()

        def read(self, into: memoryview) -> int:
            self.taken += len(into)
            assert self.taken < 1 << 26, "one link is read for ever"
            into[:] = self.frame[: len(into)]
            return len(into)

        def write(self, parts: Sequence[memoryview]) -> int:
            return 0

        def close(self) -> None:
            self.sock.close()

    class Nobody:
        max_frame_bytes = 0

        def place(self, link: Link, head: Head, sizes: Sequence[int]) -> list[memoryview]:
            return []

        def arrived(self, link: Link, head: Head, parts: list[memoryview]) -> None: ...
        def lost(self, link: Link, reason: str) -> None: ...

    link = Link(Endless(), "peer", b"", Nobody(), 1.0)
    assert link.read(), "there is more"
    link.stream.close()


def test_a_server_that_goes_is_named(key: Key) -> None:
    ledger = Ledger()
    with serving(ledger, key) as server:
        asker = Client(server.address, key, "worker 0", retry_s=0.5)
        waiting = asker.ask(NEVER)
    with pytest.raises(PeerLost, match=f"the server at 127.0.0.1:{server.address[1]} went away"):
        waiting.wait(WAIT_S)
    with pytest.raises(PeerLost):
        asker.ask(ECHO)
    asker.close()


def test_an_asker_that_goes_is_named(key: Key) -> None:
    ledger = Ledger()
    with serving(ledger, key) as server:
        Client(server.address, key, "worker 7").close()
        deadline = time.monotonic() + WAIT_S
        while not ledger.left and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ledger.joined == ["worker 7"]
        assert ledger.left == [("worker 7", "it closed the link")]


def test_a_server_that_freezes_is_given_up(key: Key) -> None:
    """Heartbeats stop with the process, though its connections stay."""
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)
    child = context.Process(target=_serve_until_killed, args=(key, tell))
    child.start()
    assert child.pid is not None
    try:
        asker = Client(told.recv(), key, "worker 0", patience_s=1.5, retry_s=0.5)
        asker.ask(ECHO).wait(WAIT_S)
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        with pytest.raises(PeerLost, match="nothing came for"):
            asker.ask(ECHO).wait(WAIT_S)
        asker.close()
    finally:
        child.kill()
        child.join()


def _serve_until_killed(key: Key, tell: Any) -> None:
    server = Server(HERE, key, Ledger().handle)
    tell.send(server.address)
    time.sleep(60)


def test_what_counts_is_served_once_over_broken_links(key: Key) -> None:
    rng, ledger = random.Random(1), Ledger(2000)
    with serving(ledger, key) as server:
        asker = Client(server.address, key, "worker 0", retry_s=5.0)
        open_ = []
        for index in range(2000):
            open_.append(asker.ask(ADD, [view(struct.pack("!I", index))], once=True))
            if rng.random() < 0.02 and (link := asker._link) is not None:
                with suppress(OSError):
                    link.stream.sock.shutdown(rng.choice([socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR]))
            if len(open_) > 100:
                open_.pop(0).wait(WAIT_S)
        for each in open_:
            each.wait(WAIT_S)
        assert ledger.counts == [1] * 2000
        (session,) = server._sessions.values()
        assert len(session.answered) <= 256 and not session.open
        asker.close()


def test_what_was_asked_before_its_reply_was_forgotten_does_not_count_again(
    key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.transport.messaging.server._KEPT_S", 0.0)
    ledger = Ledger(1)
    with serving(ledger, key, grace_s=0.1) as server:
        caller, frame = Caller(b"i" * 16, "worker 3"), Head(Kind.ONCE, ADD, 1).pack([4]) + bytes(4)
        kinds = []
        for said in range(2):
            stream = call(server.address, caller, key, None, WAIT_S)
            stream.write([memoryview(frame)])
            reply, until = bytearray(HEAD_BYTES), time.monotonic() + WAIT_S
            while not stream.read(memoryview(reply)) and time.monotonic() < until:
                time.sleep(0.01)
            kinds.append(unpack(reply)[0].kind)
            stream.close()
            while len(ledger.left) <= said and time.monotonic() < until:
                time.sleep(0.01)
    assert kinds == [Kind.REPLY, Kind.REFUSAL] and ledger.counts == [1]


def test_more_than_a_window_at_once_is_slowed_and_not_lost(key: Key) -> None:
    """A server that has not answered yet leaves the rest in the network; its memory is bounded by that."""
    held: list[Request] = []
    server = Server(HERE, key, held.append, max_frame_bytes=1 << 20)
    asker = Client(server.address, key, "worker 0")
    data = view(bytes(100_000))
    open_ = [asker.ask(ECHO, [data], once=True) for _ in range(600)]
    time.sleep(0.5)
    assert 0 < len(held) <= 256 and sum(len(each.parts[0]) for each in held) <= 5 << 20
    deadline = time.monotonic() + WAIT_S
    answered = 0
    while answered < 600 and time.monotonic() < deadline:
        for request in held[answered:]:
            request.reply()
            answered += 1
        time.sleep(0.001)
    for each in open_:
        each.wait(WAIT_S)
    asker.close()
    server.close()


def test_a_question_that_waits_is_answered_over_the_next_link(key: Key) -> None:
    held: list[Request] = []
    server = Server(HERE, key, held.append)
    asker = Client(server.address, key, "worker 0", retry_s=5.0)
    waiting = asker.ask(ECHO, [view(b"when?")])
    while not held:
        time.sleep(0.001)
    link = asker._link
    assert link is not None
    link.stream.sock.shutdown(socket.SHUT_RDWR)
    while asker._link is link or asker._link is None:
        time.sleep(0.001)
    time.sleep(0.1)
    assert len(held) == 1
    held[0].reply([view(b"now")])
    assert waiting.wait(WAIT_S) == [view(b"now")]
    asker.close()
    server.close()


def test_a_question_that_stands_keeps_no_replies_and_is_asked_again_where_its_own_was_lost(key: Key) -> None:
    held: list[Request] = []

    def handle(request: Request) -> None:
        held.append(request) if request.verb == NEVER else request.reply()

    server = Server(HERE, key, handle)
    asker = Client(server.address, key, "worker 0", retry_s=5.0)
    standing = asker.ask(NEVER)
    for _ in range(300):
        asker.ask(ADD, once=True).wait(WAIT_S)
    (session,) = server._sessions.values()
    assert len(held) == 1 and len(session.answered) <= 1
    link, session.link = session.link, None
    held[0].reply([view(b"lost")])
    assert link is not None
    link.stream.sock.shutdown(socket.SHUT_RDWR)
    until = time.monotonic() + WAIT_S
    while len(held) < 2 and time.monotonic() < until:
        time.sleep(0.001)
    held[1].reply([view(b"found")])
    assert standing.wait(WAIT_S) == [view(b"found")]
    asker.close()
    server.close()


def test_a_reply_that_does_not_fit_ends_in_one_sentence(key: Key) -> None:
    with serving(Ledger(), key) as server:
        asker = Client(server.address, key, "worker 0")
        with pytest.raises(PeerLost, match="a reply has 5 bytes where there is room for 3"):
            asker.ask(ECHO, [view(b"12345")], into=[memoryview(bytearray(3))]).wait(WAIT_S)
        asker.close()


def test_a_handler_that_fails_refuses_and_the_server_lives(key: Key) -> None:
    def handle(request: Request) -> None:
        if request.verb == NEVER:
            raise KeyError("a mistake of mine")
        request.reply()

    server = Server(HERE, key, handle)
    asker = Client(server.address, key, "worker 0")
    with pytest.raises(Refused, match="the server failed on this request"):
        asker.ask(NEVER).wait(WAIT_S)
    asker.ask(ECHO).wait(WAIT_S)
    asker.close()
    server.close()


# --- the ledger -------------------------------------------------------------------------------------------------------


PUSHES, ASKERS = 10_000, 4


def test_acknowledged_pushes_count_once_though_askers_and_links_are_killed(key: Key, tmp_path: Path) -> None:
    """Push j adds 1 at index j. Who is killed starts again behind what it had begun; that counts at most once."""
    rng, ledger = random.Random(2), Ledger(PUSHES)
    context = multiprocessing.get_context("fork")
    share = PUSHES // ASKERS
    kills = cuts = 0
    with serving(ledger, key) as server:
        files = [tmp_path / f"asker-{n}" for n in range(ASKERS)]
        children: dict[int, Any] = {}
        started = time.monotonic()
        while time.monotonic() - started < 100:
            for n, file in enumerate(files):
                if n in children and children[n].exitcode == 0:
                    continue
                if n not in children or not children[n].is_alive():
                    begun = _numbers(file, "begun")
                    first = max(begun, default=n * share - 1) + 1
                    children[n] = context.Process(
                        target=_push, args=(server.address, key, first, (n + 1) * share, file)
                    )
                    children[n].start()
            if all(each.exitcode == 0 for each in children.values()):
                break
            time.sleep(rng.uniform(0.005, 0.05))
            victim = children[rng.randrange(ASKERS)]
            links = [session.link for session in list(server._sessions.values()) if session.link is not None]
            if rng.random() < 0.5 and victim.is_alive():
                victim.kill()
                victim.join()
                kills += 1
            elif links:
                with suppress(OSError):
                    rng.choice(links).stream.sock.shutdown(socket.SHUT_RDWR)
                cuts += 1
        for each in children.values():
            each.join(5)
            each.kill()
    acknowledged = set(itertools.chain.from_iterable(_numbers(file, "done") for file in files))
    assert kills >= 5 and cuts >= 5
    assert len(acknowledged) >= PUSHES - 9 * kills
    assert all(ledger.counts[index] == 1 for index in acknowledged)
    assert set(ledger.counts) <= {0, 1}


def _push(address: tuple[str, int], key: Key, first: int, last: int, file: Path) -> None:
    """Push [first, last), eight at a time; each begun and each acknowledged push is written down before going on."""
    asker = Client(address, key, file.name, retry_s=10.0)
    with file.open("a", buffering=1) as book:
        open_: list[tuple[int, Any]] = []
        for index in range(first, last):
            book.write(f"begun {index}\n")
            time.sleep(0.0005)
            open_.append((index, asker.ask(ADD, [view(struct.pack("!I", index))], once=True)))
            while len(open_) > 8 or (index == last - 1 and open_):
                done, pending = open_.pop(0)
                pending.wait(WAIT_S)
                book.write(f"done {done}\n")
    os._exit(0)


def _numbers(file: Path, word: str) -> list[int]:
    lines = file.read_text().splitlines() if file.exists() else []
    split = [line.split() for line in lines]
    return [int(each[1]) for each in split if len(each) == 2 and each[0] == word]
