"""The control socket of a cluster's process: one JSON line each way, over a local socket without a file.

The socket ends with the process. Both sides check the other's user: a lab is entered by its owner only.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

from weft.errors import JobError
from weft.lab import namespaces

_LIMIT = 1 << 22
KINDS = (namespaces.NEWUSER, namespaces.NEWNS, namespaces.NEWNET, namespaces.NEWUTS, namespaces.NEWPID)
"""The order in which a lab's namespaces are handed over and entered."""


def address(lab: str) -> str:
    """An abstract name: it belongs to the network namespace that it was bound in, and to no file system."""
    return f"\0weft-lab-{os.getuid()}-{lab}"


def credentials(end: socket.socket) -> tuple[int, int]:
    """The other side's process and user, as they are numbered here."""
    pid, uid, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def connect(lab: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.connect(address(lab))
    except OSError:
        end.close()
        raise JobError(f"no lab '{lab}' is up; start one with `weft lab up`") from None
    if credentials(end)[1] != os.getuid():
        end.close()
        raise JobError(f"the lab '{lab}' belongs to somebody else; give another --name")
    return end


def ask(end: socket.socket, **request: Any) -> Any:
    """One request, one reply. An error of the cluster's process is raised here."""
    send(end, request)
    return receive(end)


def send(end: socket.socket, value: Any) -> None:
    end.sendall(json.dumps(value).encode() + b"\n")


def receive(end: socket.socket) -> Any:
    text = b""
    while not text.endswith(b"\n"):
        part = end.recv(65536)
        if not part or len(text) > _LIMIT:
            raise JobError("the emulated cluster went away; start it again")
        text += part
    reply = json.loads(text)
    if "error" in reply:
        raise JobError(reply["error"])
    return reply


def ask_for_namespaces(lab: str, host: int) -> list[tuple[int, int]]:
    """The namespaces of a host, as (kind, file descriptor), in the order in which to enter them."""
    with connect(lab) as end:
        send(end, {"do": "enter", "host": host})
        text, fds, _, _ = socket.recv_fds(end, 65536, len(KINDS))
    reply = json.loads(text)
    if "error" in reply:
        raise JobError(reply["error"])
    return list(zip(reply["kinds"], fds, strict=True))
