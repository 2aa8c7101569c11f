"""An aggregator: a server to its group of workers, and a single worker to the shard servers.

It sums the gradients of a bundle once the whole group has pushed them, and forwards the sum as one push; the reply is
sent to everyone in the group. Other requests are relayed. Neither workers nor servers know about aggregators.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.rounds import Contribution, mean
from weft.runtime.server.client import ServerClient
from weft.runtime.server.protocol import AT_ONCE, BEGIN, BUFFERS, BUNDLE, JOINED, PULL, PUSH, WHO, Hyper, Verb
from weft.runtime.server.service import Loss
from weft.runtime.server.statistics import Statistics
from weft.threads import start_serial_thread
from weft.topology._shards import Bundle
from weft.transport.messaging import Key, Pending, Request, Server
from weft.transport.tensor_bytes import raw

log = logging.getLogger(__name__)


@dataclass
class _Passing:
    """The state of a bundle, or of the model's buffers, between the group and the servers."""

    parts: Sequence[Tensor]
    version: int = -1
    """The step after which the held values are the model; -1 if none have arrived yet."""
    pushed: dict[int, Request] = field(default_factory=dict)
    """By worker: its gradients of the present step."""
    waiting: dict[int, tuple[Request, int, int, float]] = field(default_factory=dict)
    about: bytes = b""
    """The servers' header for this version."""


@dataclass(frozen=True)
class _Word:
    """A worker's announcement of its present step."""

    step: int
    share: float
    hyper: Hyper
    buffers: Sequence[memoryview]
    leaving: bool


@dataclass(frozen=True)
class _Came:
    """A reply of the servers, for a bundle or for a relayed request."""

    reply: Pending
    of: int | Request


class Aggregator:
    """Serves a group of `workers` until they have left; `model` is flat memory for all parameters, by name."""

    def __init__(
        self,
        address: tuple[str, int],
        key: Key,
        *,
        upstream: ServerClient,
        model: dict[str, Tensor],
        buffers: Sequence[Tensor],
        workers: int,
        encrypted: bool = False,
        encrypt_loopback: bool = True,
        lost: Callable[[Loss], None] = lambda loss: None,
    ) -> None:
        self.upstream, self.model, self.buffers, self.workers, self._lost = upstream, model, buffers, workers, lost
        self.statistics = Statistics(workers)
        self.bundles = [_Passing(_parts(route.bundle, model)) for route in upstream.routes]
        self._kept = _Passing(buffers)
        self._begun: dict[int, _Word] = {}
        self._present: dict[bytes, int] = {}
        """By process identity: its worker in the group."""
        self._left = 0
        self.over = threading.Event()
        """Set when every worker of the group has left."""
        self._inbox: queue.SimpleQueue[Request | Loss | _Came | None] = queue.SimpleQueue()
        most = 2 * max(sum(part.nbytes for part in each.parts) for each in self.bundles) + (1 << 20)
        most += sum(buffer.nbytes for buffer in buffers)
        self._server = Server(
            address,
            key,
            self._inbox.put,
            encrypted=encrypted,
            encrypt_loopback=encrypt_loopback,
            max_frame_bytes=3 * most,
            left=lambda name, why, identity: self._inbox.put(Loss(name, why, identity)),
        )
        self.address = self._server.address
        self._thread = start_serial_thread(self._serve, "weft-proxy")

    @property
    def version(self) -> int:
        """The version of the first bundle."""
        return max(0, self.bundles[0].version)

    @property
    def complete(self) -> bool:
        """Whether every worker of the group has joined."""
        return len(self._present) + self._left == self.workers

    @property
    def attended(self) -> bool:
        """Whether a worker is present."""
        return bool(self._present)

    def close(self) -> None:
        """Stop serving."""
        self._inbox.put(None)
        self._thread.join(timeout=5)
        self._server.close()

    # --- in the serving thread --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        for number in range(len(self.bundles)):  # pull the initial model, which is sent once it is set
            self.upstream.ask_for(number, self.model, self._when(number))
        if self.buffers:
            self.upstream.ask_for_buffers(self.buffers, self._when(BUFFERS))
        while (each := self._inbox.get()) is not None:
            self.statistics.depths[self._inbox.qsize()] += 1
            match each:
                case _Came(reply, Request() as asked):
                    self._pass_back(reply, asked)
                case _Came(reply, int() as number):
                    self._came(number, reply)
                case Loss(identity=identity):
                    if identity in self._present:
                        self._lost(each)
                case Request():
                    try:
                        self._do(each)
                    except Exception as error:  # a bad request must not stop the service of others
                        log.warning("a request of %s cannot be served: %s", each.sender, error)
                        with suppress(RuntimeError):  # the request may have been answered already
                            each.refuse(f"the request cannot be served: {error}")

    def _when(self, of: int | Request) -> Callable[[Pending], None]:
        return lambda reply: self._inbox.put(_Came(reply, of))

    def _do(self, request: Request) -> None:
        head, parts = request.parts[0], request.parts[1:]
        match request.verb:
            case Verb.PUSH:
                worker, number, _, _ = PUSH.unpack(head)
                self.statistics.received_bytes += sum(len(part) for part in parts)
                request.keeps = True
                self._bundle(number).pushed[self._known(worker, request)] = request
                request.reply(priority=AT_ONCE)
                self._forward(number)
            case Verb.BEGIN:
                worker, step, share, leaving = BEGIN.unpack(head)
                numbers = json.loads(bytes(parts[0]))
                blob = [memoryview(bytes(part)) for part in parts[1:]]
                self._begun[self._known(worker, request)] = _Word(step, share, numbers, blob, leaving)
                request.reply(priority=AT_ONCE)
                self._begin()
            case Verb.PULL:
                worker, number, steps, urgency = PULL.unpack(head)
                passing = self._kept if number == BUFFERS else self._bundle(number)
                passing.waiting[self._known(worker, request)] = request, steps, urgency, time.monotonic()
                self._answer(passing, worker)
            case Verb.JOIN:
                (worker,) = WHO.unpack(head)
                if not 0 <= worker < self.workers:
                    raise ValueError(f"there is no worker {worker} in this group")
                self._present = {who: each for who, each in self._present.items() if each != worker}
                self._present[request.identity] = worker
                request.reply([memoryview(JOINED.pack(0, False, 0))])
            case Verb.SET | Verb.FETCH | Verb.TELL if request.identity not in self._present:
                request.refuse(f"{request.sender} is not in this group, or was replaced; start it again")
            case Verb.SET | Verb.FETCH:
                (number,) = BUNDLE.unpack(head)
                self.upstream.relay(Verb(request.verb), number, request.parts, self._when(request))
            case Verb.TELL:
                self.upstream.relay(Verb.TELL, None, request.parts, self._when(request))
            case Verb.LEAVE:
                self._present.pop(request.identity, None)
                request.reply()
                self._left += 1
                if self._left == self.workers:
                    self.over.set()
            case _:
                request.refuse(f"an aggregator does not support request {request.verb}")

    def _known(self, worker: int, request: Request) -> int:
        """The sender's worker number. Raises ValueError if it has not joined, or another process has replaced it."""
        if self._present.get(request.identity) != worker:
            raise ValueError(f"{request.sender} is not worker {worker} of this group, or was replaced; start it again")
        return worker

    def _bundle(self, number: int) -> _Passing:
        if not 0 <= number < len(self.bundles):
            raise ValueError(f"there is no bundle {number}")
        return self.bundles[number]

    # --- to the servers -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Announce a step to the servers, once the whole group has announced it."""
        words = [self._begun[worker] for worker in sorted(self._begun)]
        if len(words) < self.workers or len({word.step for word in words}) > 1:
            return
        share, leaving = sum(word.share for word in words), any(word.leaving for word in words)
        blob = next((word.buffers for word in words if word.buffers), ())
        said = [torch.frombuffer(part, dtype=torch.uint8) for part in blob]
        self.upstream.begin(words[0].step, share, words[0].hyper, said, leave=leaving)
        if self.buffers:
            self.upstream.ask_for_buffers(self.buffers, self._when(BUFFERS))
        for number in range(len(self.bundles)):
            self._forward(number)

    def _forward(self, number: int) -> None:
        """Forward the sum of a bundle, once all gradients and all announcements of the step have arrived."""
        passing = self.bundles[number]
        steps = {PUSH.unpack(push.parts[0])[2] for push in passing.pushed.values()}
        steps |= {word.step for word in self._begun.values()}
        if len(passing.pushed) < self.workers or len(self._begun) < self.workers or len(steps) > 1:
            return
        rows = [
            Contribution(worker, self._begun[worker].share, _grads(push, passing.parts))
            for worker, push in passing.pushed.items()
        ]
        self.upstream.forward(number, mean(rows, self.workers), steps.pop(), self.model, self._when(number))

    # --- to the group -------------------------------------------------------------------------------------------------

    def _came(self, number: int, reply: Pending) -> None:
        """The servers' model of this step has arrived."""
        passing = self._kept if number == BUFFERS else self.bundles[number]
        try:
            parts = reply.wait(0.0)
        except WeftError as error:
            self._lost(Loss(f"the server at {reply.to}", str(error)))
            return
        passing.about = b"" if number == BUFFERS else bytes(parts[0])
        passing.version += 1
        last = next(reversed(passing.pushed), 0)
        for push in passing.pushed.values():
            push.release()
        passing.pushed = {}
        self._answer(passing, last)

    def _answer(self, passing: _Passing, by: int) -> None:
        for worker, (request, steps, urgency, since) in list(passing.waiting.items()):
            if passing.version >= steps:
                del passing.waiting[worker]
                values = [raw(part) for part in passing.parts]
                head = [memoryview(passing.about)] if passing is not self._kept else []
                request.reply([*head, *values], priority=urgency)
                self.statistics.sent_bytes += sum(len(part) for part in values)
                if head:
                    self.statistics.answered(worker, steps, time.monotonic() - since, by)

    def _pass_back(self, reply: Pending, asked: Request) -> None:
        try:
            asked.reply(reply.wait(0.0))
        except WeftError as error:
            asked.refuse(str(error))


def _parts(bundle: Bundle, model: dict[str, Tensor]) -> list[Tensor]:
    return [model[part.name][part.start : part.stop] for part in bundle]


def _grads(push: Request, parts: Sequence[Tensor]) -> list[Tensor | None]:
    words = push.parts[1:]
    return [
        torch.frombuffer(data, dtype=part.dtype) if len(data) else None for part, data in zip(parts, words, strict=True)
    ]
