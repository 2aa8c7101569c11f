"""The worker's side of the protocol: push gradients by bundle, and pull the model."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.compression import Compressor, Context, Piece, State
from weft.ops import Spec
from weft.runtime.record.clock import Spans
from weft.runtime.server import protocol
from weft.runtime.server.bundle_route import BundleRoute
from weft.runtime.server.compressed_push import encode_push
from weft.runtime.server.cut_state import cut_state, joined_state
from weft.runtime.server.protocol import AT_ONCE, BUFFERS, Hyper, Verb
from weft.topology._shards import Bundle, Range
from weft.transport.messaging import Client, Pending
from weft.transport.tensor_bytes import raw

_CHECK_S = 0.5


@dataclass(frozen=True)
class PulledModel:
    """A pull in progress: for each parameter, the replies that complete it."""

    replies: Mapping[str, Sequence[Pending]]
    first: bytearray
    """The header of the first bundle."""
    buffers: Pending | None
    clients: Sequence[Client]

    def wait_for(self, name: str, timeout_s: float) -> bool:
        """Wait until a parameter is in place. Returns whether it was pending."""
        early = [wait_for(each, self.clients, timeout_s) for each in self.replies[name]]
        return any(early)

    def wait_for_buffers(self, timeout_s: float) -> None:
        """Wait until the model's buffers are in place, if there are any."""
        if self.buffers is not None:
            wait_for(self.buffers, self.clients, timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Wait until the whole model is in place."""
        for name in self.replies:
            self.wait_for(name, timeout_s)
        self.wait_for_buffers(timeout_s)

    @property
    def leaving(self) -> bool:
        """Whether the run is to terminate at this version."""
        return bool(protocol.PULLED.unpack(self.first)[2])


def wait_for(reply: Pending, clients: Sequence[Client], timeout_s: float) -> bool:
    """Wait for a reply; returns whether it was pending. Fails as soon as any server is lost, since the others would
    never reply."""
    early, until = not reply.done(0.0), time.monotonic() + timeout_s
    while not reply.done(_CHECK_S):
        for client in clients:
            client.check()
        if time.monotonic() >= until:
            raise reply.overdue(timeout_s)
    reply.wait(0.0)
    return early


class ServerClient:
    """Connects one worker to all servers of a run. `bundles` lists, by server, the bundles that it keeps.

    `urgent`: parameters that the next forward needs first have priority, both ways. `near` is the server on this
    worker's own host. `rank` is the worker's global rank, if its number with these servers differs.
    """

    def __init__(
        self,
        worker: int,
        clients: Sequence[Client],
        bundles: Sequence[Sequence[Bundle]],
        specs: Mapping[str, Spec],
        compression: Compressor,
        seed: int = 0,
        *,
        urgent: bool = False,
        near: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.worker, self.clients, self.specs = worker, clients, specs
        self.rank = worker if rank is None else rank
        self.compression, self.seed, self.urgent, self.near = compression, seed, urgent, near
        places = itertools.count()
        self.routes = [
            BundleRoute(server, number, bundle, next(places))
            for server, each in enumerate(bundles)
            for number, bundle in enumerate(each)
        ]
        self._of: dict[str, list[BundleRoute]] = {}
        for route in self.routes:
            for part in route.bundle:
                self._of.setdefault(part.name, []).append(route)
        self._model: Mapping[str, Tensor] = {}
        self._grads: dict[str, Tensor | None] = {}
        self._order: dict[str, int] = {}
        """The position of each parameter in backward: the later it is finished, the sooner forward needs it."""
        self.state: State = {}
        """The compressor's state, by range."""
        self.steps = 0
        """Steps taken since joining."""
        self.spans = Spans()
        """Of the present step: each bundle's push, until its server has received it, and its pull."""
        self.sent_bytes = 0.0
        """Bytes sent to other hosts."""
        self._pushed: list[Pending] = []
        self._replies: dict[str, list[Pending]] = {}
        self._gathers = itertools.count()

    # --- joining and leaving ----------------------------------------------------------------------------------------

    def join(self, timeout_s: float) -> tuple[int, bool]:
        """Join the run. Returns this worker's step at the servers, and whether they have a model."""
        head = memoryview(protocol.WHO.pack(self.worker))
        replies = [client.ask(Verb.JOIN, [head], once=True) for client in self.clients]
        joined = [protocol.JOINED.unpack(each.wait(timeout_s)[0]) for each in replies]
        self._gathers = itertools.count(joined[0][2])
        return max(int(step) for step, _, _ in joined), all(started for _, started, _ in joined)

    def start(
        self, model: Mapping[str, Tensor], state: Mapping[str, Any], buffers: Sequence[Tensor], timeout_s: float
    ) -> None:
        """Set the initial state: flat values, and the optimizer's state of each parameter."""
        replies = []
        if buffers:
            parts = [memoryview(protocol.BUNDLE.pack(BUFFERS)), _joined(buffers)]
            replies.append(self.clients[0].ask(Verb.SET, parts, once=True))
        for route in self.routes:
            values = [model[part.name][part.start : part.stop] for part in route.bundle]
            known = [cut_state(state.get(part.name, {}), part, self.specs[part.name]) for part in route.bundle]
            parts = [memoryview(protocol.BUNDLE.pack(route.number)), *protocol.packed((values, known))]
            replies.append(self.clients[route.server].ask(Verb.SET, parts, once=True))
        for each in replies:
            each.wait(timeout_s)

    def fetch(self, timeout_s: float) -> dict[str, dict[str, Any]]:
        """The state of the servers' optimizers, by parameter."""
        replies = [
            (route, self.clients[route.server].ask(Verb.FETCH, [memoryview(protocol.BUNDLE.pack(route.number))]))
            for route in self.routes
        ]
        pieces: dict[str, list[tuple[Range, dict[str, Any]]]] = {}
        for route, each in replies:
            for part, known in zip(route.bundle, protocol.unpacked(each.wait(timeout_s)), strict=True):
                pieces.setdefault(part.name, []).append((part, known))
        return {name: joined_state(each, self.specs[name]) for name, each in pieces.items()}

    def tell(self, values: Sequence[Any], timeout_s: float) -> list[Any]:
        """Gather values by worker; None for workers that are gone. A collective call."""
        head = memoryview(protocol.TELL.pack(self.rank, next(self._gathers)))
        reply = self.clients[0].ask(Verb.TELL, [head, memoryview(json.dumps(list(values)).encode())], once=True)
        found: list[Any] = json.loads(bytes(reply.wait(timeout_s)[0]))
        return found

    def leave(self, timeout_s: float) -> None:
        """Leave the run: this worker needs nothing more."""
        head = memoryview(protocol.WHO.pack(self.worker))
        for reply in [client.ask(Verb.LEAVE, [head], once=True) for client in self.clients]:
            reply.wait(timeout_s)
        self.close()

    def close(self) -> None:
        """Close all connections."""
        for client in self.clients:
            client.close()

    def receive_memory(self, model: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Memory for values that arrive while the model is still in use."""
        return {name: torch.empty_like(flat) for name, flat in model.items()}

    # --- a step -----------------------------------------------------------------------------------------------------

    def push(self, name: str, grad: Tensor | None, step: int, into: Mapping[str, Tensor] | None = None) -> None:
        """Push a gradient, flat and already multiplied by this worker's share, once its bundle is complete.

        It must not change until the model of the next step has arrived. None: there is no gradient. `into`: pull the
        updated values into this memory at once, instead of with `pull`.
        """
        self._grads[name] = grad
        self._order.setdefault(name, len(self._order))
        for route in self._of[name]:
            route.came.add(name)
            if len(route.came) == len({part.name for part in route.bundle}):
                route.came.clear()
                self._send(route, step)
                if into is not None:
                    self.pull_bundle(route, into)
                    route.pull_pending = True

    def _send(self, route: BundleRoute, step: int) -> None:
        words: list[memoryview] = []
        for part in route.bundle:
            grad = self._grads[part.name]
            if grad is not None:
                words += map(raw, self._words(part, grad[part.start : part.stop], step))
            elif self.compression.raw:
                words.append(memoryview(b""))
        self.push_bundle(route, words, step)

    def push_bundle(self, route: BundleRoute, words: Sequence[memoryview], step: int) -> None:
        """Push the payload of a whole bundle."""
        for part in route.bundle:
            self._order.setdefault(part.name, len(self._order))
        head = memoryview(protocol.PUSH.pack(self.worker, route.number, step, route.version))
        client, began, spans = self.clients[route.server], time.perf_counter(), self.spans

        def there(_: Pending) -> None:
            route.there = time.perf_counter()
            spans.wire.append((route.place, began, route.there))

        self._pushed.append(client.ask(Verb.PUSH, [head, *words], once=True, priority=self._urgency(route), then=there))
        if route.server != self.near:
            self.sent_bytes += sum(len(word) for word in words)

    def _words(self, part: Range, grad: Tensor, step: int) -> list[Tensor]:
        """The tensors that are sent to the server: the gradient itself, or the compressor's payload."""
        if self.compression.raw:
            return [grad]
        ctx = Context(step=step, rank=self.worker, workers=1, seed=self.seed)
        value = self._model[part.name][part.start : part.stop]
        piece = Piece(part.spec(self.specs[part.name]), grad, torch.empty_like(grad), value=value)
        return encode_push(self.compression, piece, self.state, ctx)

    def _urgency(self, route: BundleRoute) -> int:
        """Priority, lowest first: parameters that backward finishes last."""
        return -max(self._order.get(part.name, 0) for part in route.bundle) if self.urgent else 0

    def begin(
        self,
        step: int,
        share: float,
        hyper: Hyper,
        buffers: Sequence[Tensor] = (),
        *,
        leave: bool = False,
    ) -> None:
        """Announce the gradients of a step, with its hyperparameters and, from worker 0, its buffers."""
        head = memoryview(protocol.BEGIN.pack(self.worker, step, share, leave))
        numbers = memoryview(json.dumps(hyper).encode())
        blob = [_joined(buffers)] if buffers else []
        self._pushed = [
            client.ask(Verb.BEGIN, [head, numbers, *(blob if not server else [])], once=True, priority=AT_ONCE)
            for server, client in enumerate(self.clients)
        ]
        self.steps += 1
        self.spans = Spans()

    def pushed(self, timeout_s: float) -> None:
        """Wait until all gradients of the last announced step have arrived; the next step must not begin earlier."""
        for each in self._pushed:
            each.wait(timeout_s)

    def pull_bundle(
        self, route: BundleRoute, into: Mapping[str, Tensor], then: Callable[[Pending], None] | None = None
    ) -> None:
        """Pull one bundle as of this step. `then` is called with the reply, which is then not part of `pull`."""
        route.about = bytearray(protocol.PULLED.size)
        memory = route.memory(route.about, into)
        head = memoryview(protocol.PULL.pack(self.worker, route.number, self.steps, self._urgency(route)))
        began, spans = time.perf_counter(), self.spans

        def back(_: Pending) -> None:
            spans.wire.append((route.place, max(began, route.there), time.perf_counter()))

        reply = self.clients[route.server].ask(Verb.PULL, [head], into=memory, priority=AT_ONCE, then=then or back)
        for name in {part.name for part in route.bundle} if then is None else ():
            self._replies.setdefault(name, []).append(reply)

    def pull_buffers(self, buffers: Sequence[Tensor], then: Callable[[Pending], None] | None = None) -> Pending:
        """Pull the model's buffers as of this step."""
        head = memoryview(protocol.PULL.pack(self.worker, BUFFERS, self.steps, AT_ONCE))
        into = [raw(buffer) for buffer in buffers]
        return self.clients[0].ask(Verb.PULL, [head], into=into, priority=AT_ONCE, then=then)

    def pull(self, model: Mapping[str, Tensor], buffers: Sequence[Tensor] = ()) -> PulledModel:
        """Pull every bundle that was not requested yet, into these flat tensors; replies arrive once this worker may
        start its next step."""
        self._model = model
        for route in self.routes:
            if not route.pull_pending:
                self.pull_bundle(route, model)
            route.pull_pending = False
        reply = self.pull_buffers(buffers) if buffers else None
        pulled, self._replies = PulledModel(self._replies, self.routes[0].about, reply, self.clients), {}
        return pulled

    def watch(
        self, route: BundleRoute, about: bytearray, into: Mapping[str, Tensor], buffers: Sequence[Tensor] = ()
    ) -> Pending:
        """Subscribe to the next values of a bundle beyond those that this worker has; the first includes buffers."""
        memory = route.memory(about, into)
        if route is self.routes[0]:
            memory += map(raw, buffers)
        head = memoryview(protocol.WATCH.pack(self.worker, route.number, route.slowest, self._urgency(route)))
        return self.clients[route.server].ask(Verb.WATCH, [head], into=memory, priority=AT_ONCE)


def _joined(tensors: Sequence[Tensor]) -> memoryview:
    """A copy of the bytes of these tensors."""
    return memoryview(b"".join(bytes(raw(each)) for each in tensors))
