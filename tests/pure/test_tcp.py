"""Addresses, deadlines and the wake-up of the selector loop."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from typing import Any

import pytest

from weft.errors import UserError
from weft.transport.selector_loop import SelectorLoop
from weft.transport.tcp import bound_address, connect, format_address, listen, parse_address, receive_exactly


@pytest.mark.parametrize("address", [("10.0.0.1", 29500), ("node-0.example", 1), ("::1", 65535), ("fe80::2", 80)])
def test_an_address_round_trips(address: tuple[str, int]) -> None:
    assert parse_address(format_address(address)) == address


def test_an_ipv6_host_needs_no_brackets() -> None:
    assert parse_address("::1:29500") == parse_address("[::1]:29500") == ("::1", 29500)


@pytest.mark.parametrize("text", ["", "here", ":29500", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:http"])
def test_another_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=f"'{text}' is not an address; write HOST:PORT, as in 10.0.0.1:29500"):
        parse_address(text)


def test_a_deadline_holds_however_often_a_byte_comes() -> None:
    with listen(("127.0.0.1", 0), backlog=1) as listener:
        ours = connect(bound_address(listener), time.monotonic() + 10)
        theirs, _ = listener.accept()
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.1):
            theirs.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            receive_exactly(ours, 1000, began + 0.5)
        assert time.monotonic() - began < 5
    finally:
        stop.set()
        thread.join()
        ours.close()
        theirs.close()


def test_bytes_are_received_exactly_and_an_early_end_is_an_error() -> None:
    one, other = socket.socketpair()
    with one, other:
        other.sendall(b"hello, and more")
        assert receive_exactly(one, 5, time.monotonic() + 10) == b"hello"
        assert receive_exactly(one, 10, time.monotonic() + 10) == b", and more"
        other.close()
        with pytest.raises(ConnectionResetError):
            receive_exactly(one, 1, time.monotonic() + 10)
        with pytest.raises(TimeoutError):
            connect(("127.0.0.1", 9), time.monotonic() - 1)


class Recorder(SelectorLoop):
    """Puts down what its thread is told."""

    def __init__(self, *socks: socket.socket) -> None:
        super().__init__("recorder")
        self.seen: list[Any] = []
        self.changed = threading.Condition()
        for sock in socks:
            self._selector.register(sock, selectors.EVENT_READ, sock)
        self._start()

    def _put(self, what: Any) -> None:
        with self.changed:
            self.seen.append(what)
            self.changed.notify_all()

    def _ready(self, data: socket.socket, events: int) -> None:
        self._put(data.recv(100))

    def _after_events(self, woken: bool) -> None:
        if woken:
            self._put("woken")

    def _tick(self, now: float) -> None:
        self._put("tick")
        if self.seen.count("tick") == 2:
            raise ZeroDivisionError

    def _failed(self, error: Exception) -> None:
        self._put(type(error))

    def saw(self, what: Any) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: what in self.seen, 10)

    def close(self) -> None:
        self._stop()
        self._release()


def test_a_loop_serves_sockets_wakes_ticks_and_reports_its_own_failure() -> None:
    one, other = socket.socketpair()
    with one, other:
        loop = Recorder(one)
        other.sendall(b"bytes")
        loop._wake()
        assert loop.saw(b"bytes") and loop.saw("woken") and loop.saw("tick") and loop.saw(ZeroDivisionError)
        loop.close()
        assert not loop._thread.is_alive()
