"""Messages between processes: what arrives, what counts once, who is let in, and what a server lives through."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import random
import resource
import select
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from weft.errors import JobError, PeerLost
from weft.transport.messaging import Client, Key, Refused, Request, Server, Stranger
from weft.transport.messaging import client as client_module
from weft.transport.messaging.frames import HEAD_BYTES, Head, Kind, unpack
from weft.transport.messaging.handshake import Caller, call
from weft.transport.messaging.links import Link

HERE = ("127.0.0.1", 0)
ECHO, ADD, NEVER = 1, 2, 3
WAIT_S = 20.0


class Ledger:
    """Serves ADD j (adds 1 at index j), ECHO, and leaves NEVER unanswered."""

    def __init__(self, size: int = 0) -> None:
        self.counts = [0] * size
        self.joined: list[str] = []
        self.left: list[tuple[str, str]] = []

    def handle(self, request: Request) -> None:
        if request.verb == ECHO:
            copies = [memoryview(bytes(part)) for part in request.parts]
            request.reply(copies)
        elif request.verb == ADD and len(request.parts) == 1 and len(request.parts[0]) == 4:
            (index,) = struct.unpack("!I", request.parts[0])
            if index < len(self.counts):
                self.counts[index] += 1
                request.reply()
            else:
                request.refuse(f"there is no index {index}")
        elif request.verb != NEVER:
            request.refuse("that is nothing I know")

    @property
    def hash(self) -> str:
        return hashlib.sha256(repr(self.counts).encode()).hexdigest()


@contextmanager
def serving(ledger: Ledger, key: Key, **options: Any) -> Iterator[Server]:
    server = Server(
        HERE, key, ledger.handle, joined=ledger.joined.append, left=lambda *who: ledger.left.append(who[:2]), **options
    )
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Key:
    return Key.make(tmp_path_factory.mktemp("key") / "key")


def view(data: bytes) -> memoryview:
    return memoryview(data)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_parts_arrive_as_they_were(key: Key, encrypted: bool) -> None:
    rng = random.Random(0)
    with serving(Ledger(), key, encrypted=encrypted) as server:
        asker = Client(server.address, key, "worker 0", encrypted=encrypted)
        for sizes in ([], [0], [1], [0, 5, 0], [100_000, 3], [5_000_001], [7] * 16):
            parts = [view(rng.randbytes(size)) for size in sizes]
            assert asker.ask(ECHO, parts).wait(WAIT_S) == parts
        asker.close()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_many_at_once_and_replies_in_place(key: Key, encrypted: bool) -> None:
    with serving(Ledger(), key, encrypted=encrypted) as server:
        askers = [Client(server.address, key, f"worker {n}", encrypted=encrypted) for n in range(4)]
        sent = {(n, i): os.urandom(20_000 + n) for n in range(4) for i in range(30)}
        rooms = {which: bytearray(len(data)) for which, data in sent.items()}
        open_ = [
            askers[n].ask(ECHO, [view(data)], into=[memoryview(rooms[n, i])], priority=-i)
            for (n, i), data in sent.items()
        ]
        for each in open_:
            each.wait(WAIT_S)
        assert rooms == sent
        for asker in askers:
            asker.close()


def test_the_urgent_leaves_first(key: Key) -> None:
    order: list[int] = []
    arrived = threading.Event()

    def handle(request: Request) -> None:
        order.append(request.parts[0][0])
        request.reply()
        if len(order) == 6:
            arrived.set()

    server = Server(HERE, key, handle)
    asker = Client(server.address, key, "worker 0")
    big = bytes(60 << 20)
    asker.ask(ECHO, [view(big)])  # keeps the link busy while the others are posted
    link = asker._link
    while link is not None and not link._leaving and not order:
        time.sleep(0)
    for n in range(1, 6):
        asker.ask(ECHO, [view(bytes([n]) * 1000)], priority=-n)
    assert arrived.wait(WAIT_S)
    assert order[0] == 0 and order[1:] == [5, 4, 3, 2, 1]
    asker.close()
    server.close()


def test_refusals_are_sentences(key: Key) -> None:
    with serving(Ledger(3), key) as server:
        asker = Client(server.address, key, "worker 0")
        with pytest.raises(Refused, match="there is no index 9"):
            asker.ask(ADD, [view(struct.pack("!I", 9))]).wait(WAIT_S)
        asker.close()


# --- who is let in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_another_key_is_refused_with_the_host_and_a_remedy(key: Key, tmp_path: Path, encrypted: bool) -> None:
    ledger = Ledger()
    other = Key.make(tmp_path / "other")
    with serving(ledger, key, encrypted=encrypted) as server:
        with pytest.raises(Stranger, match=r"127\.0\.0\.1:\d+ .*copy the key file"):
            Client(server.address, other, "worker 0", encrypted=encrypted).ask(ECHO).wait(WAIT_S)
        assert not ledger.joined


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain server", "tls server"])
def test_one_side_encrypts_and_the_other_does_not(key: Key, encrypted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.transport.messaging.handshake.PATIENCE_S", 1.0)
    with serving(Ledger(), key, encrypted=encrypted) as server, pytest.raises(PeerLost):
        Client(server.address, key, "worker 0", encrypted=not encrypted, retry_s=1.0).ask(ECHO).wait(WAIT_S)


def test_idle_unauthenticated_connections_do_not_keep_out_a_client_with_the_key(key: Key) -> None:
    with serving(Ledger(), key) as server:
        idle = [socket.create_connection(server.address) for _ in range(100)]
        askers = [Client(server.address, key, f"worker {rank}") for rank in range(3)]
        for asker in askers:
            assert bytes(asker.ask(ECHO, [view(b"hello")]).wait(WAIT_S)[0]) == b"hello"
            asker.close()
        for each in idle:
            each.close()


def test_a_server_that_ends_the_first_connections_is_called_again(key: Key) -> None:
    with serving(Ledger(), key) as server, socket.create_server(HERE) as door:

        def crowded() -> None:
            for _ in range(3):
                door.accept()[0].close()
            sock, _ = door.accept()
            with sock, socket.create_connection(server.address) as behind:
                _relay(sock, behind)

        threading.Thread(target=crowded, daemon=True).start()
        asker = Client(door.getsockname(), key, "worker 0", retry_s=WAIT_S)
        assert bytes(asker.ask(ECHO, [view(b"hello")]).wait(WAIT_S)[0]) == b"hello"
        asker.close()


def _relay(one: socket.socket, other: socket.socket) -> None:
    """Pass bytes both ways until either side is gone."""
    ways = {one: other, other: one}
    while True:
        for ready in select.select(list(ways), [], [])[0]:
            if not (some := ready.recv(1 << 16)):
                return
            ways[ready].sendall(some)


def test_the_handshake_has_one_deadline_however_often_a_byte_comes(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.transport.messaging.handshake.PATIENCE_S", 1.0)
    hello = b"\x16\x03\x01\x02\x00\x01" + bytes(506)  # the beginning of a TLS handshake
    with serving(Ledger(), key, encrypted=True) as server, socket.create_connection(server.address) as sock:
        sock.settimeout(0.4)
        for byte in hello[:20]:
            with suppress(TimeoutError):
                assert sock.recv(1) == b""
                return
            sock.sendall(bytes([byte]))
    pytest.fail("a handshake that does not end was waited for")


def test_a_certificate_does_not_depend_on_a_hosts_clock(key: Key) -> None:
    assert key.file is not None
    found = ssl._ssl._test_decode_cert(str(key.file))  # type: ignore[attr-defined]
    assert found["notBefore"] == "Jan  1 00:00:00 2000 GMT" and found["notAfter"] == "Dec 31 00:00:00 9999 GMT"


def test_what_stays_on_a_machine_may_go_unencrypted_and_nothing_else(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2, called from 127.0.0.1, stands for another machine."""
    monkeypatch.setattr("weft.transport.messaging.handshake.PATIENCE_S", 1.0)
    with serving(Ledger(), key, encrypted=True, encrypt_loopback=False) as server:
        for options in ({"encrypted": True, "encrypt_loopback": False}, {"encrypted": False}):
            asker = Client(server.address, key, "worker 0", **options)  # type: ignore[arg-type]
            assert bytes(asker.ask(ECHO, [view(b"hello")]).wait(WAIT_S)[0]) == b"hello"
            asker.close()
        with pytest.raises(PeerLost):
            Client(server.address, key, "worker 1", encrypted=True, retry_s=1.0).ask(ECHO).wait(WAIT_S)
    far = Server(("127.0.0.2", 0), key, Ledger().handle, encrypted=True, encrypt_loopback=False)
    asker = Client(far.address, key, "worker 0", encrypted=True, encrypt_loopback=False)
    assert bytes(asker.ask(ECHO, [view(b"hello")]).wait(WAIT_S)[0]) == b"hello"
    asker.close()
    with pytest.raises(PeerLost):
        Client(far.address, key, "worker 1", retry_s=1.0).ask(ECHO).wait(WAIT_S)
    far.close()


def test_nobody_at_the_address() -> None:
    with socket.create_server(HERE) as free:
        address = free.getsockname()
    with pytest.raises(PeerLost, match="no server answers at 127"):
        Client(address, Key.fresh(), "worker 0", retry_s=0.3)


def test_a_key_file_is_its_owners(tmp_path: Path) -> None:
    file = tmp_path / "key"
    made = Key.make(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert Key.read(file) == made
    assert made.secret.hex() not in repr(made)
    with pytest.raises(JobError, match="exists already"):
        Key.make(file)
    file.chmod(0o640)
    with pytest.raises(JobError, match="can be read by others"):
        Key.read(file)
    with pytest.raises(JobError, match="copy it from where"):
        Key.read(tmp_path / "none")
    (tmp_path / "odd").touch(0o600)
    with pytest.raises(JobError, match="not a key file"):
        Key.read(tmp_path / "odd")
    with pytest.raises(JobError, match="--key-file"):
        Key.fresh().context(server=True)


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


# --- unauthenticated connections, and liars with the key --------------------------------------------------------------

FRAMES = int(os.environ.get("WEFT_FUZZ_FRAMES", "100000"))


def memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def junk(rng: random.Random, counted: list[bytes]) -> bytes:
    """Garbage, oversized, truncated, replayed or merely odd."""
    whole = Head(Kind.ONCE, ADD, rng.randrange(1, 1 << 20), 0).pack([4]) + struct.pack("!I", 1 << 20)
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randrange(1, 200))
        case 1:
            return Head(Kind.QUERY, ECHO, 1).pack([1 << rng.randrange(27, 63)])
        case 2:
            return whole[: rng.randrange(1, len(whole))]
        case 3:
            return rng.choice(counted) if counted else whole
        case 4:
            return struct.pack("!4sBBHQQ", b"weft", rng.randrange(256), rng.randrange(256), 9, 2**64 - 1, 0)
        case _:
            return bytes(a ^ (rng.random() < 0.1) * rng.randrange(256) for a in whole)


def test_unauthenticated_connections_change_nothing(key: Key) -> None:
    """Without the key nothing is even read as a frame: each connection ends at the hello."""
    rng, ledger = random.Random(3), Ledger(1000)
    with serving(ledger, key, max_frame_bytes=1 << 20) as server:
        before, memory, sent = ledger.hash, memory_bytes(), 0
        while sent < FRAMES:
            with suppress(OSError), socket.create_connection(server.address, timeout=WAIT_S) as sock:
                sock.sendall(b"".join(junk(rng, []) for _ in range(500)))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
            sent += 500
        assert ledger.hash == before and not ledger.joined
        assert memory_bytes() - memory < 64 << 20
        _still_serves(server, key, ledger)


def test_liars_with_the_key_break_only_their_own_links(key: Key) -> None:
    """With the key odd frames end a link, replays count once, and the server lives."""
    rng, ledger = random.Random(4), Ledger(1000)
    with serving(ledger, key, max_frame_bytes=1 << 20) as server:
        memory, sent, number = memory_bytes(), 0, 0
        while sent < FRAMES:
            stream = client_module.call(server.address, client_module.Caller(b"liar" * 4, "liar"), key, None, WAIT_S)
            stream.sock.settimeout(WAIT_S)
            counted = []
            for _ in range(8):
                number += 1
                body = struct.pack("!I", number % 1000)
                counted.append(Head(Kind.ONCE, ADD, number, max(0, number - 30)).pack([4]) + body)
            said = counted + [rng.choice(counted) for _ in range(40)]
            said += [junk(rng, counted), junk(rng, counted)]
            with suppress(OSError):
                stream.sock.sendall(b"".join(said))
            stream.close()
            sent += len(said)
        assert max(ledger.counts) <= -(-number // 1000)
        assert memory_bytes() - memory < 64 << 20
        _still_serves(server, key, ledger)


def _still_serves(server: Server, key: Key, ledger: Ledger) -> None:
    asker = Client(server.address, key, "honest")
    before = ledger.counts[3]
    asker.ask(ADD, [view(struct.pack("!I", 3))], once=True).wait(WAIT_S)
    assert ledger.counts[3] == before + 1
    asker.close()
