"""The rendezvous of a run: processes on several machines find its servers, and joining processes get an assignment.

    HERE    server; address      announces the address of a server
    WHERE   server               answered with its address, once that is known
    SEAT                         answered with an assignment, which is held as long as the link

The launcher of node 0 hosts it. Only processes with the run's key can send requests.
"""

from __future__ import annotations

import enum
import json
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.environment import ProcessPlace, RunOptions
from weft.errors import JobError
from weft.transport.messaging import Client, Key, Request, Server
from weft.transport.tcp import parse_address

_SERVER = struct.Struct("!I")


class RendezvousVerb(enum.IntEnum):
    """The requests to the rendezvous."""

    HERE = 1
    WHERE = 2
    SEAT = 3


TOLD = {*ProcessPlace.names().values(), *RunOptions.names().values()}
"""The environment variables that an assignment may set. None of them makes a process import or load anything."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The part of a joining process: a job, its arguments, and the environment that sets its rank."""

    job: str
    args: tuple[str, ...]
    env: dict[str, str]


class Rendezvous:
    """Listens until closed. `vacant` are the ranks to be assigned, `seat` returns the assignment of one of them."""

    def __init__(
        self,
        address: tuple[str, int],
        key: Key,
        *,
        encrypted: bool,
        vacant: Sequence[int] = (),
        seat: Callable[[int], dict[str, Any]] = lambda rank: {},
        said: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._vacant, self._seat, self._said = sorted(vacant), seat, said
        self._taken: dict[bytes, int] = {}
        self._known: dict[int, bytes] = {}
        self._asking: dict[int, list[Request]] = {}
        self._lock = threading.Lock()
        self._server = Server(address, key, self._do, encrypted=encrypted, max_frame_bytes=1 << 20, left=self._left)
        self.address = self._server.address

    def vacate(self, rank: int) -> None:
        """Make a rank available again, after its process is lost."""
        with self._lock:
            if rank not in self._vacant:
                self._vacant = sorted([*self._vacant, rank])

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _do(self, request: Request) -> None:
        with self._lock:
            match request.verb:
                case RendezvousVerb.HERE:
                    (server,) = _SERVER.unpack(request.parts[0])
                    self._known[server] = bytes(request.parts[1])
                    request.reply()
                    for each in self._asking.pop(server, ()):
                        each.reply([memoryview(self._known[server])])
                case RendezvousVerb.WHERE:
                    (server,) = _SERVER.unpack(request.parts[0])
                    if server in self._known:
                        request.reply([memoryview(self._known[server])])
                    else:
                        self._asking.setdefault(server, []).append(request)
                case RendezvousVerb.SEAT if not self._vacant:
                    request.refuse("every rank of this run is taken; try again when a worker is lost")
                case RendezvousVerb.SEAT:
                    rank = self._taken[request.identity] = self._vacant.pop(0)
                    request.reply([memoryview(json.dumps(self._seat(rank)).encode())])
                    self._said(f"{request.sender} joins as process {rank}")
                case _:
                    request.refuse(f"the rendezvous does not support request {request.verb}")

    def _left(self, name: str, why: str, identity: bytes) -> None:
        with self._lock:
            rank = self._taken.pop(identity, None)
        if rank is not None:
            self._said(f"{name}, process {rank}, left ({why})")
            self.vacate(rank)


def reach(address: str, key: Key, name: str, *, encrypted: bool, retry_s: float = 30.0) -> Client:
    """Connect to the rendezvous of a run."""
    return Client(parse_address(address), key, name, encrypted=encrypted, max_frame_bytes=1 << 20, retry_s=retry_s)


def say_here(rendezvous: Client, server: int, address: str, timeout_s: float) -> None:
    rendezvous.ask(
        RendezvousVerb.HERE, [memoryview(_SERVER.pack(server)), memoryview(address.encode())], once=True
    ).wait(timeout_s)


def ask_where(rendezvous: Client, server: int, timeout_s: float) -> str:
    return bytes(rendezvous.ask(RendezvousVerb.WHERE, [memoryview(_SERVER.pack(server))]).wait(timeout_s)[0]).decode()


def take_assignment(rendezvous: Client, timeout_s: float) -> Assignment:
    """Request an assignment. Rejects any environment variable that is not in TOLD."""
    said = bytes(rendezvous.ask(RendezvousVerb.SEAT, once=True).wait(timeout_s)[0])
    try:
        found = json.loads(said)
        seating = Assignment(job=found["job"], args=tuple(found["args"]), env=dict(found["env"]))
        texts = [seating.job, *seating.args, *seating.env, *seating.env.values()]
        unknown = sorted(set(seating.env) - TOLD)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a job, its arguments and its environment must be text")
        if ProcessPlace.from_env(seating.env).rank is None or not RunOptions.from_env(seating.env).strategy:
            raise ValueError("it has no rank or no strategy")
    except (KeyError, TypeError, ValueError) as error:
        raise JobError(f"the assignment cannot be read ({error}); use the same version of Weft on both sides") from None
    if unknown:
        raise JobError(
            f"the run would set {', '.join(unknown)} here, which no run needs; check the address, and use the same "
            "version of Weft on both sides"
        )
    return seating
