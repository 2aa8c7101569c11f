"""Messages between processes: parts, priorities, refusals, and the peers that are let in."""

from __future__ import annotations

import os
import random
import select
import socket
import ssl
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.process.message_ledger import ADD, ECHO, HERE, WAIT_S, Ledger, serving, view
from weft.errors import JobError, PeerLost
from weft.transport.messaging import Client, Key, Refused, Request, Server, Stranger


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
