"""How fast messages travel between two processes, and what they cost: ours plain and encrypted, beside other ways.

    python bench/messaging.py                 over loopback; ZeroMQ's rows where pyzmq is installed

Ways alternate, round by round. "Large" are requests of 8 MiB with an empty reply, four on their way; "small" are
requests of 64 bytes, one at a time. CPU seconds are both processes' together, for each GB.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.transport.messaging import Client, Key, Request, Server

HERE = "127.0.0.1"
LARGE, AT_ONCE = 8 << 20, 4


def ours(tell: Any, key: Key, encrypted: bool) -> None:
    """Serve until told otherwise."""

    def handle(request: Request) -> None:
        request.reply()

    server = Server((HERE, 0), key, handle, encrypted=encrypted)
    tell.send((server.address, time.process_time()))
    tell.recv()
    tell.send(time.process_time())
    threading.Event().wait()


def ask_ours(address: Any, key: Key, encrypted: bool, count: int, size: int, at_once: int) -> None:
    asker = Client(address, key, "bench", encrypted=encrypted)
    data = memoryview(bytearray(size))
    waiting = []
    for _ in range(count):
        waiting.append(asker.ask(1, [data]))
        if len(waiting) >= at_once:
            waiting.pop(0).wait(60)
    for each in waiting:
        each.wait(60)
    asker.close()


def sockets(tell: Any, key: Key, encrypted: bool) -> None:
    """No frames; encrypted: as the standard library's own sockets do it."""
    with socket.create_server((HERE, 0)) as listener:
        tell.send((listener.getsockname(), time.process_time()))
        threading.Thread(target=_drain, args=(listener, key if encrypted else None), daemon=True).start()
        tell.recv()
        tell.send(time.process_time())
        threading.Event().wait()


def _drain(listener: socket.socket, key: Key | None) -> None:
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if key is not None:
            sock = key.context(server=True).wrap_socket(sock, server_side=True)
        size = int.from_bytes(_read(sock, memoryview(bytearray(8))), "big")
        room = memoryview(bytearray(size))
        while _read(sock, room):
            sock.sendall(b"\0")


def _read(sock: socket.socket, room: memoryview) -> memoryview:
    """Fill it; empty where the other side has closed."""
    got = 0
    while got < len(room):
        some = sock.recv_into(room[got:])
        if not some:
            return room[:0]
        got += some
    return room


def ask_sockets(address: Any, key: Key, encrypted: bool, count: int, size: int, at_once: int) -> None:
    data = bytearray(size)
    with socket.create_connection(address) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = key.context(server=False).wrap_socket(plain) if encrypted else plain
        sock.sendall(size.to_bytes(8, "big"))
        out = 0
        for _ in range(count):
            sock.sendall(data)
            out += 1
            if out >= at_once:
                sock.recv(1)
                out -= 1
        while out:
            out -= len(sock.recv(out))
        sock.close()


def zeromq(tell: Any, key: Key, encrypted: bool) -> None:
    import zmq

    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    public, secret = zmq.curve_keypair()
    if encrypted:
        router.curve_server, router.curve_publickey, router.curve_secretkey = True, public, secret
    port = router.bind_to_random_port(f"tcp://{HERE}")
    tell.send(((port, public), time.process_time()))
    threading.Thread(target=_answer, args=(router,), daemon=True).start()
    tell.recv()
    tell.send(time.process_time())
    threading.Event().wait()


def _answer(router: Any) -> None:
    while True:
        who, _ = router.recv_multipart(copy=False)
        router.send_multipart([who, b"\0"])


def ask_zeromq(address: Any, key: Key, encrypted: bool, count: int, size: int, at_once: int) -> None:
    import zmq

    port, server = address
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    if encrypted:
        dealer.curve_serverkey = server
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.connect(f"tcp://{HERE}:{port}")
    data, out = bytearray(size), 0
    for _ in range(count):
        dealer.send(data, copy=False)
        out += 1
        if out >= at_once:
            dealer.recv()
            out -= 1
    while out:
        dealer.recv()
        out -= 1
    dealer.close()


Serve = Callable[[Any, Key, bool], None]
Ask = Callable[[Any, Key, bool, int, int, int], None]


def measured(serve: Serve, ask: Ask, key: Key, encrypted: bool, large: int, small: int) -> tuple[float, float, float]:
    """GB/s, CPU seconds for each GB, and microseconds of a small request."""
    context = multiprocessing.get_context("spawn")
    tell, told = context.Pipe()
    child = context.Process(target=serve, args=(told, key, encrypted), daemon=True)
    child.start()
    address, before = tell.recv()
    ask(address, key, encrypted, 4, LARGE, AT_ONCE)
    began, busy = time.perf_counter(), time.process_time()
    ask(address, key, encrypted, large, LARGE, AT_ONCE)
    took, busy = time.perf_counter() - began, time.process_time() - busy
    tell.send("how much?")
    cpu = busy + tell.recv() - before
    began = time.perf_counter()
    ask(address, key, encrypted, small, 64, 1)
    each = (time.perf_counter() - began) / small
    child.kill()
    child.join()
    moved = large * LARGE / 1e9
    return moved / took, cpu / moved, each * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", type=int, default=100)
    parser.add_argument("--small", type=int, default=1000)
    args = parser.parse_args()
    ways: dict[str, tuple[Serve, Ask, bool]] = {
        "plain sockets, no frames (the limit)": (sockets, ask_sockets, False),
        "the ssl module's sockets, no frames": (sockets, ask_sockets, True),
        "ours": (ours, ask_ours, False),
        "ours, TLS 1.3": (ours, ask_ours, True),
    }
    if importlib.util.find_spec("zmq"):
        ways |= {"ZeroMQ": (zeromq, ask_zeromq, False), "ZeroMQ, CURVE": (zeromq, ask_zeromq, True)}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        key = Key.make(Path(folder) / "key")
        for _ in range(args.rounds):
            for name, (serve, ask, encrypted) in ways.items():
                found[name].append(measured(serve, ask, key, encrypted, args.large, args.small))
    print(f"{args.rounds} rounds, {os.cpu_count()} cores; medians, and quartiles of the rate")
    print("| | GB/s | quartiles | Gbit/s | CPU s for each GB | small request, µs |")
    print("|---|---|---|---|---|---|")
    for name, rows in found.items():
        rate, cpu, small = (statistics.median(each) for each in zip(*rows, strict=True))
        low, _, high = statistics.quantiles([row[0] for row in rows], n=4)
        print(f"| {name} | {rate:.2f} | {low:.2f} to {high:.2f} | {8 * rate:.1f} | {cpu:.2f} | {small:.0f} |")


if __name__ == "__main__":
    sys.exit(main())
