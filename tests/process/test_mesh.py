"""Connections of our own: messages by tag, both ways at once, and who went away."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from weft.errors import PeerLost
from weft.transport.mesh import Mesh
from weft.transport.mesh_handshake import connect_all
from weft.transport.parcel import Parcel
from weft.transport.tcp import parse_address
from weft.transport.tensor_bytes import raw


@contextmanager
def meshes(count: int, timeout_s: float = 60.0) -> Iterator[list[Mesh]]:
    """So many processes' meshes, each with a thread of its own, over loopback."""
    store = HashStore()
    with ThreadPoolExecutor(count) as pool:
        made = list(pool.map(lambda rank: Mesh(rank, count, "127.0.0.1", store, timeout_s), range(count)))
    try:
        yield made
    finally:
        for mesh in made:
            mesh.close()


def of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_messages_of_one_tag_come_in_order_and_tags_do_not_mix() -> None:
    with meshes(2) as (one, other):
        for tag in (7, 8):
            for value in range(3):
                one.post([(1, raw(of(tag, value)))], [], tag).wait()
        got = {tag: [torch.empty(2) for _ in range(3)] for tag in (8, 7)}
        for tag, rows in got.items():  # asked for in another order than sent, after they have come
            for row in rows:
                other.post([], [(0, raw(row))], tag).wait()
    assert {tag: [row.tolist() for row in rows] for tag, rows in got.items()} == {
        tag: [[tag, value] for value in range(3)] for tag in (8, 7)
    }


def test_large_messages_go_all_ways_at_once() -> None:
    count, size = 3, 3_000_001
    with meshes(count) as made:
        mine = [torch.full((size,), float(rank)) for rank in range(count)]
        rooms = [[torch.empty(size) for _ in range(count)] for _ in range(count)]
        parcels = []
        for rank, mesh in enumerate(made):
            others = [p for p in range(count) if p != rank]
            sends, recvs = [(p, raw(mine[rank])) for p in others], [(p, raw(rooms[rank][p])) for p in others]
            parcels.append(mesh.post(sends, recvs, 1))
        for parcel in parcels:
            parcel.wait()
    assert all(torch.equal(rooms[a][b], mine[b]) for a in range(count) for b in range(count) if a != b)


def test_what_is_done_is_told_once_whenever_one_asks() -> None:
    with meshes(2) as (one, other):
        told: list[str] = []
        room = torch.empty(1)
        parcel = other.post([], [(0, raw(room))], 0)
        parcel.then(lambda: told.append("then"))
        assert not told
        one.post([(1, raw(of(5.0)))], [], 0).wait()
        parcel.wait()
        parcel.then(lambda: told.append("later"))
        while len(told) < 2:
            threading.Event().wait(0.01)
    assert sorted(told) == ["later", "then"] and room.item() == 5.0


def test_an_empty_parcel_is_done() -> None:
    told: list[str] = []
    with meshes(2) as (one, _):
        one.post([], [], 0).then(lambda: told.append("done"))
    assert told == ["done"]


def test_no_size_is_left_waiting() -> None:
    """Sizes whose ends fall anywhere in a packet: the last few bytes wake the reader as well as the first many."""
    with meshes(2) as (one, other):
        for size in (*range(1, 40), *range(700_000, 700_040), 5_000_003):
            data, room = torch.randint(0, 256, (size,), dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
            parcel = other.post([], [(0, raw(room))], 0)
            one.post([(1, raw(data))], [], 0)
            parcel.wait()
            assert torch.equal(room, data), size


def test_who_went_away_is_named_and_the_others_still_talk() -> None:
    with meshes(3) as (one, other, third):
        room, early = torch.empty(1), torch.empty(1)
        third.post([(0, raw(of(1.0)))], [], 4).wait()
        one.post([], [(2, raw(early))], 4).wait()
        waiting = one.post([], [(2, raw(room))], 5)
        third.close()
        with pytest.raises(PeerLost, match="process 2 went away"):
            waiting.wait()
        with pytest.raises(PeerLost, match="process 2 went away"):
            one.post([], [(2, raw(room))], 6).wait()
        with pytest.raises(PeerLost, match="process 2 went away"):
            one.post([(2, raw(room))], [], 6).wait()
        other.post([(0, raw(of(3.0)))], [], 1).wait()
        one.post([], [(1, raw(room))], 1).wait()
    assert early.item() == 1.0 and room.item() == 3.0


def test_nobody_is_waited_for_for_ever() -> None:
    with meshes(2, timeout_s=0.5) as (one, _), pytest.raises(PeerLost, match=r"process 1 .*nothing came for 0\.5 s"):
        one.post([], [(1, raw(torch.empty(1)))], 0).wait()


@contextmanager
def beside_a_socket(timeout_s: float = 0.5) -> Iterator[tuple[Mesh, socket.socket]]:
    """The mesh of process 0, and the bare socket of process 1, which does what it likes."""
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(connect_all, 1, 2, "127.0.0.1", store)
        mesh = Mesh(0, 2, "127.0.0.1", store, timeout_s)
        other = met.result(30)[0]
    with other:
        yield mesh, other
    mesh.close()


def outcome(parcel: Parcel) -> BaseException | None:
    """What a wait raises; a wait that does not end in 20 s fails here."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(parcel.wait)
        try:
            return waiting.exception(20)
        except TimeoutError:
            parcel.finish_one(PeerLost("the test's"))
            raise


def test_a_peer_that_freezes_within_a_message_is_given_up() -> None:
    with beside_a_socket() as (mesh, other):
        parcel = mesh.post([], [(1, raw(torch.empty(1000)))], 7)
        other.sendall(struct.pack("!QQ", 7, 4000) + bytes(500))
        assert "nothing came of the rest of a message for 0.5 s" in str(outcome(parcel))


def test_a_slow_message_is_waited_for_as_long_as_bytes_come() -> None:
    room = torch.empty(10)
    with beside_a_socket() as (mesh, other):
        parcel = mesh.post([], [(1, raw(room))], 7)
        other.sendall(struct.pack("!QQ", 7, 40))
        for value in range(10):
            threading.Event().wait(0.15)
            other.sendall(raw(of(value)))
        parcel.wait()
    assert room.tolist() == list(range(10))


def test_a_peer_that_does_not_read_is_given_up() -> None:
    with beside_a_socket() as (mesh, _):
        assert "it read nothing of what was sent to it" in str(
            outcome(mesh.post([(1, memoryview(bytes(1 << 26)))], [], 7))
        )


def test_a_length_that_is_nonsense_costs_only_the_peer() -> None:
    with beside_a_socket() as (mesh, other):
        other.sendall(struct.pack("!QQ", 9, 1 << 62))
        assert "more than the memory" in str(outcome(mesh.post([], [(1, raw(torch.empty(1)))], 7)))
        assert mesh._thread.is_alive()


def test_an_error_in_the_thread_ends_every_wait_and_is_its_cause() -> None:
    with meshes(2) as (one, other):
        waiting, told = other.post([], [(0, raw(torch.empty(1)))], 1), other.post([], [(0, raw(torch.empty(1)))], 2)

        def fail() -> None:
            raise ZeroDivisionError("on purpose")

        told.then(fail)
        one.post([(1, raw(of(1.0)))], [], 2).wait()
        later = [lambda: other.post([], [(0, raw(torch.empty(1)))], 3), lambda: other.post([(0, raw(of(1.0)))], [], 4)]
        for post in (lambda: waiting, *later):
            error = outcome(post())
            assert "messages between workers failed in this process: ZeroDivisionError" in str(error)
            assert error is not None and isinstance(error.__cause__, ZeroDivisionError)


def test_a_message_of_another_size_is_an_error() -> None:
    with meshes(2) as (one, other):
        parcel = other.post([], [(0, raw(torch.empty(4)))], 0)
        one.post([(1, raw(torch.empty(2)))], [], 0).wait()
        with pytest.raises(PeerLost, match="8 bytes where 16 were expected"):
            parcel.wait()
    with meshes(2) as (one, other):
        for tag in (0, 1):
            one.post([(1, raw(torch.empty(2)))], [], tag).wait()
        other.post([], [(0, raw(torch.empty(2)))], 1).wait()  # so that the first one has come, too
        with pytest.raises(PeerLost, match="8 bytes where 16 were expected"):
            other.post([], [(0, raw(torch.empty(4)))], 0).wait()


def test_a_connection_without_the_token_is_closed() -> None:
    """A connection without the run's token comes first; the processes connect all the same."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Mesh, 0, 2, "127.0.0.1", store, 60.0)
        with socket.create_connection(parse_address(store.get("weft/mesh/0").decode())) as sock:
            sock.sendall(b"0123456789abcdef\0\0\0\1")
            sock.settimeout(10)
            assert sock.recv(1) == b"", "hung up on"
        second = pool.submit(Mesh, 1, 2, "127.0.0.1", store, 60.0)
        one, other = first.result(30), second.result(30)
    room = torch.empty(1)
    one.post([(1, raw(of(2.0)))], [], 0).wait()
    other.post([], [(0, raw(room))], 0).wait()
    assert room.item() == 2.0
    one.close()
    other.close()
