"""The measured rate of links: hosts send to hosts as fast as they can, through plain sockets, for a moment."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

from weft.lab import namespaces
from weft.runtime.launch.process_groups import die_with_parent

if TYPE_CHECKING:
    from weft.lab.cluster_process import ClusterProcess

_WARM_S = 0.15
_CHUNK = 1 << 18
PACKET_BYTES = 80_000
"""The largest packet that leaves a socket, with the headers that its segments will have; no burst may be smaller."""


def flood(cluster: ClusterProcess, pairs: list[tuple[int, int]], seconds: float) -> dict[str, Any]:
    """Every pair (from, to) at once; returns bytes per second of each link up and down, and of each pair's payload."""
    listeners = [_listen(cluster, to, number) for number, (_, to) in enumerate(pairs)]
    begins = time.monotonic() + 0.1 + 0.01 * len(pairs) + _WARM_S
    ends = begins + seconds
    tallies, children = [], []
    for number, (source, to) in enumerate(pairs):
        tally, told = os.pipe()
        tallies.append(tally)
        children += [
            _fork(lambda told=told, end=listeners[number]: _receive(told, end, begins, ends)),
            _fork(lambda source=source, to=to, number=number: _send(cluster, source, to, number, ends)),
        ]
        os.close(told)
        listeners[number].close()
    _until(begins)
    before = cluster.counters()
    _until(ends)
    after = cluster.counters()
    for child in children:
        os.waitpid(child, 0)
    payload = []
    for tally in tallies:
        with os.fdopen(tally) as pipe:
            payload.append(float(pipe.read() or 0))
    links = [
        [
            (after["bytes"][host][way] - before["bytes"][host][way])
            / (after["at"][host][way] - before["at"][host][way])
            for way in (0, 1)
        ]
        for host in range(len(before["bytes"]))
    ]
    return {"links": links, "payload": payload}


def _until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _fork(act: Any) -> int:
    child = os.fork()
    if child:
        return child
    die_with_parent()
    status = 1
    try:
        act()
        status = 0
    finally:
        os._exit(status)


def _listen(cluster: ClusterProcess, host: int, number: int) -> socket.socket:
    from weft.lab.cluster_process import host_address

    with cluster.own_namespaces():
        cluster.enter_host(host, namespaces.NEWNET)
        listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host_address(host), 30000 + number))
    listener.listen()
    return listener


def _send(cluster: ClusterProcess, source: int, to: int, number: int, ends: float) -> None:
    from weft.lab.cluster_process import host_address

    cluster.enter_host(source, namespaces.NEWNET)
    chunk = bytes(_CHUNK)
    with socket.create_connection((host_address(to), 30000 + number), timeout=5) as end:
        while time.monotonic() < ends + 0.1:
            end.sendall(chunk)


def _receive(told: int, listener: socket.socket, begins: float, ends: float) -> None:
    """Payload bytes per second between the two moments."""
    listener.settimeout(5)
    end, _ = listener.accept()
    scratch = memoryview(bytearray(_CHUNK))
    first, first_at, count = 0, 0.0, 0
    while True:
        got = end.recv_into(scratch)
        now = time.monotonic()
        count += got
        if not first_at and now >= begins:
            first, first_at = count, now
        if now >= ends or not got:
            break
    os.write(told, str((count - first) / max(1e-9, now - first_at)).encode())
    while end.recv_into(scratch):
        pass
