"""A worker's side of parameter servers: gradients out, bundle by bundle, and the model back in."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.compression import Compressor, Context, Piece, State
from weft.errors import LoopError
from weft.ops import Spec
from weft.runtime.checks.finite import all_finite
from weft.runtime.record.clock import Spans
from weft.runtime.server.compressed_push import encode_push
from weft.runtime.server.protocol import (
    AT_ONCE,
    BEGIN,
    BUFFERS,
    BUNDLE,
    JOINED,
    PULL,
    PULLED,
    PUSH,
    TELL,
    WATCH,
    WHO,
    Hyper,
    Verb,
)
from weft.runtime.server.protocol import packed as packed_state
from weft.runtime.server.protocol import unpacked as unpacked_state
from weft.topology._shards import Bundle, Range
from weft.transport.messaging import Client, Pending
from weft.transport.tensor_bytes import raw

_LOOK_S = 0.5


@dataclass
class BundleRoute:
    """A bundle on its way, between this worker and the server that keeps it."""

    server: int
    number: int
    bundle: Bundle
    place: int
    """Its number among all."""
    came: set[str] = field(default_factory=set)
    asked: bool = False
    """Whether what the next `pull` asks for is on its way already."""
    about: bytearray = field(default_factory=lambda: bytearray(PULLED.size))
    """What its server said of the values that this worker has."""
    there: float = 0.0
    """When its server had got the last push."""

    @property
    def version(self) -> int:
        return int(PULLED.unpack(self.about)[0])

    @property
    def slowest(self) -> int:
        """The clock of the slowest worker by then."""
        return int(PULLED.unpack(self.about)[1])


@dataclass(frozen=True)
class PulledModel:
    """The model on its way: for each parameter what must have come before it is there."""

    replies: Mapping[str, Sequence[Pending]]
    first: bytearray
    """What the first server says about its first bundle."""
    buffers: Pending | None
    clients: Sequence[Client]

    def wait_for(self, name: str, timeout_s: float) -> bool:
        """Until a parameter is in place. Returns whether it was not there yet."""
        early = [wait_for(each, self.clients, timeout_s) for each in self.replies[name]]
        return any(early)

    def wait_for_buffers(self, timeout_s: float) -> None:
        """Until the model's buffers are in place, where there are some."""
        if self.buffers is not None:
            wait_for(self.buffers, self.clients, timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Until all of it is in place."""
        for name in self.replies:
            self.wait_for(name, timeout_s)
        self.wait_for_buffers(timeout_s)

    @property
    def leaving(self) -> bool:
        """Whether the run was asked to leave at this version."""
        return bool(PULLED.unpack(self.first)[2])


def wait_for(reply: Pending, clients: Sequence[Client], timeout_s: float) -> bool:
    """Until a reply is there; returns whether it was not there yet. Whichever server is lost, nobody waits for the
    others in vain."""
    early, until = not reply.done(0.0), time.monotonic() + timeout_s
    while not reply.done(_LOOK_S) and time.monotonic() < until:
        for client in clients:
            client.check()
    reply.wait(0.0)
    return early


class ServerClient:
    """All servers of a run, asked by one worker. `bundles` says, server by server, what it keeps.

    `urgent`: what the next forward needs first goes first, both ways. `near` is the server on this worker's own host,
    `rank` its number among all, where it has another with these servers.
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
        """When backward finishes each parameter: the later, the sooner forward needs it."""
        self.state: State = {}
        """What the compressor remembers, by range."""
        self.steps = 0
        """Taken since joining."""
        self.spans = Spans()
        """Of the step that was begun last: each bundle's way there, until its server has it, and its way back."""
        self.sent_bytes = 0.0
        """To other hosts."""
        self._pushed: list[Pending] = []
        self._replies: dict[str, list[Pending]] = {}
        self._tellings = itertools.count()

    # --- coming and going -------------------------------------------------------------------------------------------

    def join(self, timeout_s: float) -> tuple[int, bool]:
        """Take part. Returns the step that the servers have this worker at, and whether they have a model."""
        asked = [client.ask(Verb.JOIN, [memoryview(WHO.pack(self.worker))], once=True) for client in self.clients]
        told = [JOINED.unpack(each.wait(timeout_s)[0]) for each in asked]
        self._tellings = itertools.count(told[0][2])
        return max(int(step) for step, _, _ in told), all(started for _, started, _ in told)

    def start(
        self, model: Mapping[str, Tensor], state: Mapping[str, Any], buffers: Sequence[Tensor], timeout_s: float
    ) -> None:
        """What training starts from: flat values, and what the optimizer remembers of each parameter."""
        asked = []
        if buffers:
            blob = memoryview(b"".join(bytes(raw(buffer)) for buffer in buffers))
            asked.append(self.clients[0].ask(Verb.SET, [memoryview(BUNDLE.pack(BUFFERS)), blob], once=True))
        for route in self.routes:
            values = [model[part.name][part.start : part.stop] for part in route.bundle]
            known = [cut_state(state.get(part.name, {}), part, self.specs[part.name]) for part in route.bundle]
            head = memoryview(BUNDLE.pack(route.number))
            parts = [head, *packed_state((values, known))]
            asked.append(self.clients[route.server].ask(Verb.SET, parts, once=True))
        for each in asked:
            each.wait(timeout_s)

    def fetch(self, timeout_s: float) -> dict[str, dict[str, Any]]:
        """What the servers' optimizers remember, by parameter."""
        asked = [
            (route, self.clients[route.server].ask(Verb.FETCH, [memoryview(BUNDLE.pack(route.number))]))
            for route in self.routes
        ]
        pieces: dict[str, list[tuple[Range, dict[str, Any]]]] = {}
        for route, each in asked:
            for part, known in zip(route.bundle, unpacked_state(each.wait(timeout_s)), strict=True):
                pieces.setdefault(part.name, []).append((part, known))
        return {name: joined_state(each, self.specs[name]) for name, each in pieces.items()}

    def tell(self, values: Sequence[Any], timeout_s: float) -> list[Any]:
        """Everyone's values, by worker; None for those who are gone."""
        head = memoryview(TELL.pack(self.rank, next(self._tellings)))
        asked = self.clients[0].ask(Verb.TELL, [head, memoryview(json.dumps(list(values)).encode())], once=True)
        found: list[Any] = json.loads(bytes(asked.wait(timeout_s)[0]))
        return found

    def leave(self, timeout_s: float) -> None:
        """This worker has all it needs."""
        who = memoryview(WHO.pack(self.worker))
        for asked in [client.ask(Verb.LEAVE, [who], once=True) for client in self.clients]:
            asked.wait(timeout_s)
        self.close()

    def close(self) -> None:
        """Hang up."""
        for client in self.clients:
            client.close()

    def room(self, model: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Memory for what comes while the model is still needed."""
        return {name: torch.empty_like(flat) for name, flat in model.items()}

    # --- a step -----------------------------------------------------------------------------------------------------

    def push(self, name: str, grad: Tensor | None, step: int, into: Mapping[str, Tensor] | None = None) -> None:
        """Send a gradient, flat and already multiplied by this worker's share, with those that travel with it.

        It must not change until the model of the next step is there. None: there is no gradient. `into`: have what it
        becomes brought there at once, instead of with `pull`.
        """
        self._grads[name] = grad
        self._order.setdefault(name, len(self._order))
        for route in self._of[name]:
            route.came.add(name)
            if len(route.came) == len({part.name for part in route.bundle}):
                route.came.clear()
                self._send(route, step)
                if into is not None:
                    self._ask_for(route, into)
                    route.asked = True

    def _send(self, route: BundleRoute, step: int) -> None:
        words: list[memoryview] = []
        for part in route.bundle:
            grad = self._grads[part.name]
            if grad is not None:
                words += map(raw, self._words(part, grad[part.start : part.stop], step))
            elif self.compression.raw:
                words.append(memoryview(b""))
        self._push(route, words, step)

    def _push(self, route: BundleRoute, words: Sequence[memoryview], step: int) -> None:
        head = memoryview(PUSH.pack(self.worker, route.number, step, route.version))
        client, began, spans = self.clients[route.server], time.perf_counter(), self.spans

        def there(_: Pending) -> None:
            route.there = time.perf_counter()
            spans.wire.append((route.place, began, route.there))

        self._pushed.append(client.ask(Verb.PUSH, [head, *words], once=True, priority=self._urgency(route), then=there))
        if route.server != self.near:
            self.sent_bytes += sum(len(word) for word in words)

    def forward(
        self,
        number: int,
        sums: Sequence[Tensor | None],
        step: int,
        into: Mapping[str, Tensor],
        then: Callable[[Pending], None],
    ) -> None:
        """Send a bundle's gradients as they are, and have what they become brought there; numbers go on from server to
        server."""
        route = self.routes[number]
        for part in route.bundle:
            self._order.setdefault(part.name, len(self._order))
        self._push(route, [memoryview(b"") if grad is None else raw(grad) for grad in sums], step)
        self.ask_for(number, into, then)

    def ask_for(self, number: int, into: Mapping[str, Tensor], then: Callable[[Pending], None]) -> None:
        """Have one bundle brought there, as it is after this step."""
        self._ask_for(self.routes[number], into, then)

    def relay(
        self, verb: Verb, number: int | None, parts: Sequence[memoryview], then: Callable[[Pending], None]
    ) -> None:
        """Ask for somebody else: about a bundle, or None: whatever the first server is asked."""
        client = self.clients[0]
        if number is not None and number != BUFFERS:
            route = self.routes[number]
            client, parts = self.clients[route.server], [memoryview(BUNDLE.pack(route.number)), *parts[1:]]
        client.ask(verb, parts, once=verb is not Verb.FETCH, then=then)

    def _words(self, part: Range, grad: Tensor, step: int) -> list[Tensor]:
        """What goes to the server: the gradient itself, or what a compressor says about it."""
        if self.compression.raw:
            return [grad]
        ctx = Context(step=step, rank=self.worker, workers=1, seed=self.seed)
        value = self._model[part.name][part.start : part.stop]
        piece = Piece(part.spec(self.specs[part.name]), grad, torch.empty_like(grad), value=value)
        words = encode_push(self.compression, piece, self.state, ctx)
        if not all_finite(piece.mean):
            for kept in self.state.get(piece.spec.name, {}).values():
                kept.nan_to_num_(0.0, 0.0, 0.0)
            what = f"{self.compression} makes values that are not finite of the gradient of {part.name}"
            raise LoopError(
                f"{what}, at step {step + 1}; use another one, such as cast(dtype=bf16), or scale the loss down"
            )
        return words

    def _urgency(self, route: BundleRoute) -> int:
        """Lower goes first: what backward finishes last."""
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
        """Gradients of a step will come, to be used with these numbers and, by worker 0, these buffers."""
        head = memoryview(BEGIN.pack(self.worker, step, share, leave))
        numbers = memoryview(json.dumps(hyper).encode())
        blob = [memoryview(b"".join(bytes(raw(buffer)) for buffer in buffers))] if buffers else []
        self._pushed = [
            client.ask(Verb.BEGIN, [head, numbers, *(blob if not server else [])], once=True, priority=AT_ONCE)
            for server, client in enumerate(self.clients)
        ]
        self.steps += 1
        self.spans = Spans()

    def pushed(self, timeout_s: float) -> None:
        """Until all gradients of the last step that was begun have arrived; before that, no other may begin."""
        for each in self._pushed:
            each.wait(timeout_s)

    def _ask_for(
        self, route: BundleRoute, into: Mapping[str, Tensor], then: Callable[[Pending], None] | None = None
    ) -> None:
        route.about = bytearray(PULLED.size)
        room = [memoryview(route.about), *(raw(into[part.name][part.start : part.stop]) for part in route.bundle)]
        head = memoryview(PULL.pack(self.worker, route.number, self.steps, self._urgency(route)))
        began, spans = time.perf_counter(), self.spans

        def back(_: Pending) -> None:
            spans.wire.append((route.place, max(began, route.there), time.perf_counter()))

        asked = self.clients[route.server].ask(Verb.PULL, [head], into=room, priority=AT_ONCE, then=then or back)
        for name in {part.name for part in route.bundle} if then is None else ():
            self._replies.setdefault(name, []).append(asked)

    def ask_for_buffers(self, buffers: Sequence[Tensor], then: Callable[[Pending], None] | None = None) -> Pending:
        """Have the model's buffers brought there, as they are after this step."""
        head = memoryview(PULL.pack(self.worker, BUFFERS, self.steps, AT_ONCE))
        into = [raw(buffer) for buffer in buffers]
        return self.clients[0].ask(Verb.PULL, [head], into=into, priority=AT_ONCE, then=then)

    def pull(self, model: Mapping[str, Tensor], buffers: Sequence[Tensor] = ()) -> PulledModel:
        """Ask for what was not asked for yet: it comes into the memory of these flat tensors once this worker may go
        on."""
        self._model = model
        for route in self.routes:
            if not route.asked:
                self._ask_for(route, model)
            route.asked = False
        waits = self.ask_for_buffers(buffers) if buffers else None
        pulled, self._replies = PulledModel(self._replies, self.routes[0].about, waits, self.clients), {}
        return pulled

    def watch(
        self, route: BundleRoute, about: bytearray, into: Mapping[str, Tensor], buffers: Sequence[Tensor] = ()
    ) -> Pending:
        """A standing request for what comes after what this worker has of a bundle. Buffers come with the first."""
        room = [memoryview(about), *(raw(into[part.name][part.start : part.stop]) for part in route.bundle)]
        if route is self.routes[0]:
            room += map(raw, buffers)
        head = memoryview(WATCH.pack(self.worker, route.number, route.slowest, self._urgency(route)))
        return self.clients[route.server].ask(Verb.WATCH, [head], into=room, priority=AT_ONCE)


# --- an optimizer's state, where a parameter is kept in pieces --------------------------------------------------------


def cut_state(state: Mapping[str, Any], part: Range, spec: Spec) -> dict[str, Any]:
    """A range's share of what is remembered about a parameter: tensors of its shape are cut, all else is alike."""
    if part.numel == spec.numel:
        return dict(state)
    alike = torch.Size(spec.shape)
    return {
        name: each.reshape(-1)[part.start : part.stop] if isinstance(each, Tensor) and each.shape == alike else each
        for name, each in state.items()
    }


def joined_state(pieces: Sequence[tuple[Range, dict[str, Any]]], spec: Spec) -> dict[str, Any]:
    """The opposite."""
    ordered = sorted(pieces, key=lambda piece: piece[0].start)
    first_range, first = ordered[0]
    if len(ordered) == 1:
        return first
    return {
        name: torch.cat([known[name] for _, known in ordered]).view(spec.shape)
        if isinstance(each, Tensor) and each.shape == (first_range.numel,)
        else each
        for name, each in first.items()
    }
