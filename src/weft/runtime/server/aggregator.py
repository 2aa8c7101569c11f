"""An aggregator: a server to its group of workers, and a single worker to the shard servers.

It sums the gradients of a bundle once the whole group has pushed them, and forwards the sum as one push; the reply is
sent to everyone in the group. Other requests are relayed. Neither workers nor servers know about aggregators.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.rounds import Contribution, mean
from weft.runtime.server import protocol
from weft.runtime.server.client import ServerClient
from weft.runtime.server.pending_pulls import PendingPull, PendingPulls
from weft.runtime.server.protocol import BUFFERS, Announcement, Verb
from weft.runtime.server.request_loop import Inbox, Loss, RequestLoop
from weft.runtime.server.statistics import Statistics
from weft.runtime.server.upstream import Upstream
from weft.topology._shards import Bundle
from weft.transport.messaging import Key, Pending, Request
from weft.transport.tensor_bytes import raw


@dataclass
class _Passing:
    """The state of a bundle, or of the model's buffers, between the group and the servers."""

    parts: Sequence[Tensor]
    version: int = -1
    """The step after which the held values are the model; -1 if none have arrived yet."""
    pushed: dict[int, Request] = field(default_factory=dict)
    """By worker: its gradients of the present step."""
    pulls: PendingPulls = field(default_factory=PendingPulls)
    about: bytes = b""
    """The servers' header for this version."""


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
        self._servers = Upstream(upstream)
        self.statistics = Statistics(workers)
        self.bundles = [_Passing(_parts(route.bundle, model)) for route in upstream.routes]
        self._kept = _Passing(buffers)
        self._announced: dict[int, Announcement] = {}
        self._present: dict[bytes, int] = {}
        """By process identity: its worker in the group."""
        self._left = 0
        self.over = threading.Event()
        """Set when every worker of the group has left."""
        self._inbox: Inbox = queue.SimpleQueue()
        most = 2 * max(sum(part.nbytes for part in each.parts) for each in self.bundles) + (1 << 20)
        most += sum(buffer.nbytes for buffer in buffers)
        self._pull_initial_model()
        self._loop = RequestLoop(
            self._inbox,
            address,
            key,
            name="weft-aggregator",
            serve=self._serve,
            lost=self._remove_lost,
            statistics=self.statistics,
            max_frame_bytes=3 * most,
            encrypted=encrypted,
            encrypt_loopback=encrypt_loopback,
        )
        self.address = self._loop.address

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
        self._loop.close()

    # --- in the serving thread --------------------------------------------------------------------------------------

    def _pull_initial_model(self) -> None:
        """Pull the initial model, which the servers send once it is set."""
        for number in range(len(self.bundles)):
            self._servers.pull(number, self.model, self._then(partial(self._came, number)))
        if self.buffers:
            self.upstream.pull_buffers(self.buffers, self._then(partial(self._came, BUFFERS)))

    def _then(self, act: Callable[[Pending], None]) -> Callable[[Pending], None]:
        """Call `act` in the serving thread with the servers' reply."""
        return lambda reply: self._inbox.put(partial(act, reply))

    def _remove_lost(self, loss: Loss) -> None:
        if loss.identity in self._present:
            self._lost(loss)

    def _serve(self, request: Request) -> None:
        head = request.parts[0]
        match request.verb:
            case Verb.PUSH:
                worker, number, _, _ = protocol.PUSH.unpack(head)
                self.statistics.received_bytes += sum(len(part) for part in request.parts[1:])
                request.keeps = True
                self._bundle(number).pushed[self._known(worker, request)] = request
                request.reply(priority=protocol.AT_ONCE)
                self._forward(number)
            case Verb.BEGIN:
                announced = Announcement.unpack(request.parts)
                self._announced[self._known(announced.worker, request)] = announced
                request.reply(priority=protocol.AT_ONCE)
                self._begin()
            case Verb.PULL:
                worker, number, steps, urgency = protocol.PULL.unpack(head)
                passing = self._kept if number == BUFFERS else self._bundle(number)
                passing.pulls.add(self._known(worker, request), PendingPull(request, steps, urgency))
                self._answer(passing, worker)
            case Verb.JOIN:
                (worker,) = protocol.WHO.unpack(head)
                if not 0 <= worker < self.workers:
                    raise ValueError(f"there is no worker {worker} in this group")
                self._present = {who: each for who, each in self._present.items() if each != worker}
                self._present[request.identity] = worker
                request.reply([memoryview(protocol.JOINED.pack(0, False, 0))])
            case Verb.SET | Verb.FETCH | Verb.TELL if request.identity not in self._present:
                request.refuse(f"{request.sender} is not in this group, or was replaced; start it again")
            case Verb.SET | Verb.FETCH:
                self._relay(request, *protocol.BUNDLE.unpack(head))
            case Verb.TELL:
                self._relay(request, None)
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
        group = [self._announced[worker] for worker in sorted(self._announced)]
        if len(group) < self.workers or len({each.step for each in group}) > 1:
            return
        share, leaving = sum(each.share for each in group), any(each.leaving for each in group)
        blob = next((each.buffers for each in group if each.buffers), ())
        buffers = [torch.frombuffer(part, dtype=torch.uint8) for part in blob]
        self.upstream.begin(group[0].step, share, group[0].hyper, buffers, leave=leaving)
        if self.buffers:
            self.upstream.pull_buffers(self.buffers, self._then(partial(self._came, BUFFERS)))
        for number in range(len(self.bundles)):
            self._forward(number)

    def _forward(self, number: int) -> None:
        """Forward the sum of a bundle, once all gradients and all announcements of the step have arrived."""
        passing = self.bundles[number]
        steps = {protocol.PUSH.unpack(push.parts[0])[2] for push in passing.pushed.values()}
        steps |= {each.step for each in self._announced.values()}
        if len(passing.pushed) < self.workers or len(self._announced) < self.workers or len(steps) > 1:
            return
        rows = [
            Contribution(worker, self._announced[worker].share, _grads(push, passing.parts))
            for worker, push in passing.pushed.items()
        ]
        summed = mean(rows, self.workers)
        self._servers.forward(number, summed, steps.pop(), self.model, self._then(partial(self._came, number)))

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
        for worker, pull in passing.pulls.take(lambda _, steps: passing.version >= steps):
            values = [raw(part) for part in passing.parts]
            head = [memoryview(passing.about)] if passing is not self._kept else []
            pull.request.reply([*head, *values], priority=pull.urgency)
            self.statistics.sent_bytes += sum(len(part) for part in values)
            if head:
                self.statistics.answered(worker, pull.steps, pull.waited_s, by)

    def _relay(self, request: Request, number: int | None) -> None:
        then = self._then(partial(self._pass_back, request))
        self._servers.relay(Verb(request.verb), number, request.parts, then)

    def _pass_back(self, request: Request, reply: Pending) -> None:
        try:
            request.reply(reply.wait(0.0))
        except WeftError as error:
            request.refuse(str(error))


def _parts(bundle: Bundle, model: dict[str, Tensor]) -> list[Tensor]:
    return [model[part.name][part.start : part.stop] for part in bundle]


def _grads(push: Request, parts: Sequence[Tensor]) -> list[Tensor | None]:
    words = push.parts[1:]
    return [
        torch.frombuffer(data, dtype=part.dtype) if len(data) else None for part, data in zip(parts, words, strict=True)
    ]
