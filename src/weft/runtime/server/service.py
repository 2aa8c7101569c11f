"""A parameter server: a shard of the model, its optimizer, and replies to the requests of `protocol`.

Each bundle has its own rounds, so that the last layers are updated and pulled while the gradients of the first layers
are still to come.

Pushes, joins and leaves take effect once, however often links break. One thread serves; the thread of the messaging
layer only queues requests.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.compression import Compressor, Context, Piece
from weft.rounds import Contribution, Rounds
from weft.runtime.checks.finite import all_finite
from weft.runtime.server.buffers import ServerBuffers
from weft.runtime.server.bundle_state import BundleState
from weft.runtime.server.compressed_push import decode_push
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
from weft.runtime.server.statistics import Statistics
from weft.synchrony import Synchrony, View
from weft.threads import start_serial_thread
from weft.transport.messaging import Key, Request, Server
from weft.transport.tensor_bytes import raw

log = logging.getLogger(__name__)

_ANEW = "the request was repeated, or its worker was lost"


@dataclass(frozen=True)
class Loss:
    """A lost worker."""

    name: str
    reason: str
    identity: bytes = b""
    """The identity of the process, among all processes of this name."""


@dataclass
class _Watch:
    """A subscription: answered once the slowest worker's clock is beyond `clock`."""

    request: Request
    clock: int
    urgency: int
    since: float | None = None
    """Since when its worker has been waiting for the reply."""


class _Open:
    """The rounds of a bundle, its pending pushes and its pending pulls."""

    def __init__(self, kept: BundleState, rounds: Rounds) -> None:
        self.kept, self.rounds = kept, rounds
        self.arrived: dict[int, tuple[int, int, list[Tensor | None], Request]] = {}
        """By worker: step, version read and gradients of a push whose BEGIN has not arrived yet."""
        self.done = [0] * rounds.workers
        """By worker: the number of its steps that were contributed since it joined."""
        self.given = [-1] * rounds.workers
        """By worker: its number of steps at its last read of the model since it joined."""
        self.waiting: dict[int, tuple[Request, int, int, float]] = {}
        self.watching: dict[int, _Watch] = {}
        self.used: list[Request] = []
        """Pushes whose memory the present round still needs."""
        self._snapshot: tuple[int, list[memoryview]] | None = None

    def slowest(self, worker: int, view: View) -> int:
        """The slowest worker's clock, in steps of this worker; a returning worker continues at the slowest's clock."""
        return self.done[worker] - max(0, view.clocks[worker] - view.slowest)

    def give_up(self, worker: int, why: str = _ANEW) -> None:
        """Refuse a pending pull, so that a repeated one takes its place."""
        if worker in self.waiting:
            self.waiting.pop(worker)[0].refuse(why)

    def give_up_watch(self, worker: int, why: str = _ANEW) -> None:
        if worker in self.watching:
            self.watching.pop(worker).request.refuse(why)

    def release(self) -> None:
        """Release the memory of pushes, once their round is closed."""
        if not self.rounds.round:
            for push in self.used:
                if push.keeps:
                    push.release()
            self.used = []

    def snapshot(self, version: int) -> list[memoryview]:
        """The values of a version. In lockstep the model does not change until all have read it, so it is sent
        uncopied; otherwise all readers of a version share one copy."""
        if self._snapshot is None or self._snapshot[0] != version:
            parts = [part.detach() for part in self.kept.parts]
            copies = parts if self.rounds.synchrony.lockstep else [part.clone() for part in parts]
            self._snapshot = version, [raw(part) for part in copies]
        return self._snapshot[1]


class ShardService:
    """Serves one shard of a model until closed."""

    def __init__(
        self,
        address: tuple[str, int],
        key: Key,
        *,
        synchrony: Synchrony,
        compression: Compressor,
        kept: Sequence[BundleState],
        workers: int,
        worker_groups: Sequence[range] = (),
        seed: int = 0,
        encrypted: bool = False,
        encrypt_loopback: bool = True,
        buffers: int = 0,
        patience_s: float | None = None,
        lost: Callable[[Loss], None] = lambda loss: None,
    ) -> None:
        self._worker_groups = worker_groups or [range(worker, worker + 1) for worker in range(workers)]
        """By client: its workers; an aggregator stands for a group."""
        self.compression, self.seed, self.workers, self._lost = compression, seed, len(self._worker_groups), lost
        self.synchrony = synchrony
        self.statistics = Statistics(self.workers)
        self.bundles = [
            _Open(each, Rounds(synchrony, each.parts, self.workers, each.step, updated=self._updated)) for each in kept
        ]
        self._begun: dict[int, tuple[int, float, Hyper]] = {}
        self._steps: dict[int, int] = {}
        """By worker: its next step."""
        self._failed: dict[int, str] = {}
        self._gone: set[int] = set()
        self._places: dict[bytes, int] = {}
        """By process identity: its worker, from its join until it leaves or another process replaces it."""
        self._came: set[int] = set()
        self._set: set[int] = set()
        self._told: dict[int, dict[int, tuple[Request, Any]]] = {}
        self._telling = 0
        """The number of the next telling to be answered."""
        self._buffers = ServerBuffers(buffers)
        self.over = threading.Event()
        """Set when every worker has joined and left again."""
        self._inbox: queue.SimpleQueue[Request | Loss | None] = queue.SimpleQueue()
        most = 6 * max((each.nbytes for each in kept), default=0) + buffers + (1 << 20)
        self._server = Server(
            address,
            key,
            self._inbox.put,
            encrypted=encrypted,
            encrypt_loopback=encrypt_loopback,
            max_frame_bytes=most,
            patience_s=patience_s,
            left=lambda name, why, identity: self._inbox.put(Loss(name, why, identity)),
        )
        self.address = self._server.address
        self._thread = start_serial_thread(self._serve, "weft-server")

    @property
    def version(self) -> int:
        """The number of updates of the first bundle."""
        return self.bundles[0].rounds.version

    @property
    def complete(self) -> bool:
        """Whether every worker has joined."""
        return len(self._came) == self.workers

    @property
    def attended(self) -> bool:
        """Whether a worker is present."""
        return len(self._came) > len(self._gone)

    def close(self) -> None:
        """Stop serving."""
        self._inbox.put(None)
        self._thread.join(timeout=5)
        self._server.close()

    # --- in the serving thread --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (request := self._inbox.get()) is not None:
            self.statistics.depths[self._inbox.qsize()] += 1
            if isinstance(request, Loss):
                self._leave(request)
                continue
            try:
                self._do(request)
            except Exception as error:  # a bad request must not stop the service of others
                self._cannot(request, f"the request cannot be served: {error}")

    def _cannot(self, request: Request, why: str) -> None:
        """Refuse a request. If gradients are lost by that, later pulls of their worker are refused as well."""
        log.warning("a request of %s is refused: %s", request.sender, why)
        with suppress(RuntimeError):  # the request may have been answered already
            request.refuse(why)
        worker = self._places.get(request.identity)
        if worker is None or request.verb not in (Verb.PUSH, Verb.BEGIN):
            return
        self._failed[worker] = why
        self._buffers.give_up(worker, why)
        for bundle in self.bundles:
            bundle.give_up(worker, why)
            bundle.give_up_watch(worker, why)

    def _do(self, request: Request) -> None:
        head, parts = request.parts[0], request.parts[1:]
        match request.verb:
            case Verb.PUSH:
                worker, number, step, version = PUSH.unpack(head)
                self._present(worker, request)
                self._hear(worker, self._bundle(number), step, version, request)
                request.reply(priority=AT_ONCE)
                self._count(worker, self._bundle(number))
            case Verb.BEGIN:
                worker, step, share, leaving = BEGIN.unpack(head)
                self._present(worker, request)
                self._begun[worker] = step, share, json.loads(bytes(parts[0]))
                self._steps[worker] = step + 1
                self._buffers.offer(worker, parts[1:], leaving)
                request.reply(priority=AT_ONCE)
                for bundle in self.bundles:
                    self._count(worker, bundle)
            case Verb.PULL:
                worker, number, steps, urgency = PULL.unpack(head)
                self._present(worker, request)
                self._pull(worker, number, steps, urgency, request)
            case Verb.WATCH:
                worker, number, clock, urgency = WATCH.unpack(head)
                self._present(worker, request)
                self._watch(worker, self._bundle(number), _Watch(request, clock, urgency))
            case Verb.JOIN:
                (worker,) = WHO.unpack(head)
                step = self._join(worker, request)
                request.reply([memoryview(JOINED.pack(step, self._started, self._telling))])
                self._answer_tellings()
            case Verb.SET:
                (number,) = BUNDLE.unpack(head)
                self._joined(request)
                self._start(number, parts)
                request.reply()
                self._answer_all()
            case Verb.FETCH:
                (number,) = BUNDLE.unpack(head)
                self._joined(request)
                request.reply(packed_state(self._bundle(number).kept.state()))
            case Verb.TELL:
                worker, number = TELL.unpack(head)
                self._present(self._asker(worker), request)
                self._told.setdefault(number, {})[worker] = request, json.loads(bytes(parts[0]))
                self._answer_tellings()
            case Verb.LEAVE:
                (worker,) = WHO.unpack(head)
                self._present(worker, request)
                del self._places[request.identity]
                request.reply()
                for bundle in self.bundles:
                    bundle.give_up_watch(worker)
                self._go(worker)
                self._look_who_is_left()
            case _:
                request.refuse(f"a parameter server does not support request {request.verb}")

    # --- joining and leaving ----------------------------------------------------------------------------------------

    def _join(self, worker: int, request: Request) -> int:
        """A worker joins or rejoins: its pending requests are dropped. Returns its next step."""
        if not 0 <= worker < self.workers:
            raise ValueError(f"there is no worker {worker}")
        self._places = {who: each for who, each in self._places.items() if each != worker}
        self._places[request.identity] = worker
        self._came.add(worker)
        self._gone.discard(worker)
        self._begun.pop(worker, None)
        self._failed.pop(worker, None)
        for bundle in self.bundles:
            bundle.arrived.pop(worker, None)
            bundle.done[worker], bundle.given[worker] = 0, -1
            bundle.give_up(worker)
            bundle.give_up_watch(worker)
            bundle.rounds.join(worker)
            bundle.rounds.reads[worker] = -1
        return self._steps.get(worker, 0)

    def _joined(self, request: Request) -> int:
        """The sender's worker number. Raises ValueError if it has not joined, or another process has replaced it."""
        worker = self._places.get(request.identity)
        if worker is None:
            raise ValueError(f"{request.sender} has not joined, or was replaced while it was away; start it again")
        return worker

    def _present(self, worker: int, request: Request) -> None:
        """Check the sender's worker number, and count the worker as present again if its link had been lost."""
        if self._joined(request) != worker:
            raise ValueError(f"{request.sender} sends as worker {worker}, which it is not")
        if worker in self._gone:
            self._gone.discard(worker)
            for bundle in self.bundles:
                bundle.rounds.join(worker)

    def _asker(self, worker: int) -> int:
        """The client of a worker: the worker itself, or the aggregator of its group."""
        return next((asker for asker, team in enumerate(self._worker_groups) if worker in team), -1)

    def _leave(self, loss: Loss) -> None:
        """Remove a lost worker. If it returns, its next request adds it again."""
        worker = self._places.get(loss.identity)
        if worker is None:
            return
        for bundle in self.bundles:
            bundle.give_up(worker)  # subscriptions stay: they are answered by the next update, or repeated
        if not self.synchrony.lockstep:  # in lockstep the run stops, and the open round is dropped
            self._go(worker)
        self._lost(loss)
        self._look_who_is_left()

    def _go(self, worker: int) -> None:
        self._gone.add(worker)
        for bundle in self.bundles:
            bundle.rounds.leave(worker)
        self._answer_all(worker)
        self._answer_tellings()

    def _look_who_is_left(self) -> None:
        if self.complete and not self.attended:
            self.over.set()

    def _answer_tellings(self) -> None:
        """Send all values to all workers, once every worker present has sent its own."""
        there = {worker for asker, team in enumerate(self._worker_groups) if asker not in self._gone for worker in team}
        for number in [number for number, told in self._told.items() if there <= set(told)]:
            told = self._told.pop(number)
            self._telling = max(self._telling, number + 1)
            rows = json.dumps(
                [told[worker][1] if worker in told else None for worker in range(self._worker_groups[-1].stop)]
            )
            for request, _ in told.values():
                request.reply([memoryview(rows.encode())])

    # --- training ---------------------------------------------------------------------------------------------------

    def _bundle(self, number: int) -> _Open:
        if not 0 <= number < len(self.bundles):
            raise ValueError(f"there is no bundle {number}")
        return self.bundles[number]

    def _start(self, number: int, parts: Sequence[memoryview]) -> None:
        if self._started:
            raise ValueError("the model is already set")
        if number == BUFFERS:
            self._buffers.set(parts)
        else:
            self._bundle(number).kept.set(*unpacked_state(parts))
            self._set.add(number)

    @property
    def _started(self) -> bool:
        """Whether the model has its initial values."""
        return len(self._set) == len(self.bundles)

    def _hear(self, worker: int, bundle: _Open, step: int, version: int, push: Request) -> None:
        """Decode a push. A missing gradient has no payload; uncompressed ones stay in the memory of the message."""
        kept, words = bundle.kept, push.parts[1:]
        self.statistics.received_bytes += sum(len(word) for word in words)
        grads: list[Tensor | None] = []
        if self.compression.raw:
            for part, data in zip(kept.parts, words, strict=True):
                grads.append(torch.frombuffer(data, dtype=part.dtype).view(part.shape) if len(data) else None)
        elif not words:
            grads.append(None)
        else:
            (part,), (spec,) = kept.parts, kept.specs
            out = torch.zeros(part.numel(), dtype=part.dtype)
            piece = Piece(spec, torch.zeros_like(out), out)
            decode_push(self.compression, words, piece, Context(step=step, rank=worker, workers=1, seed=self.seed))
            grads.append(out.view(part.shape))
        for spec, grad in zip(kept.specs, grads, strict=True):
            if grad is not None and not all_finite(grad):
                what = f"the gradient of {spec.name} from {self._named(worker)} is NaN or infinite at step {step + 1}"
                raise ValueError(f"{what}; lower the learning rate or scale the loss down")
        push.keeps = self.compression.raw
        bundle.arrived[worker] = step, version, grads, push

    def _named(self, worker: int) -> str:
        team = self._worker_groups[worker]
        return f"worker {team.start}" if len(team) == 1 else f"one of workers {team.start} to {team.stop - 1}"

    def _count(self, worker: int, bundle: _Open) -> None:
        """Contribute a worker's gradients to the round, if they have arrived and their step has begun."""
        step, share, hyper = self._begun.get(worker, (-1, 0.0, []))
        if worker not in bundle.arrived or bundle.arrived[worker][0] != step:
            return
        _, read, grads, push = bundle.arrived.pop(worker)
        bundle.used.append(push)
        bundle.kept.set_numbers(hyper)
        version = bundle.rounds.version
        bundle.rounds.contribute(Contribution(worker, share, grads, read))
        bundle.done[worker] += 1
        bundle.release()
        if bundle is self.bundles[0]:
            self._buffers.counted(worker, bundle.rounds.version if bundle.rounds.version > version else None)
        self._answer(bundle, worker)

    def _pull(self, worker: int, number: int, steps: int, urgency: int, request: Request) -> None:
        if worker in self._failed:
            request.refuse(self._failed[worker])
            return
        if number == BUFFERS:
            self._buffers.ask(worker, request, steps)
            self._answer(self.bundles[0], worker)
            return
        bundle = self._bundle(number)
        bundle.give_up(worker)
        bundle.waiting[worker] = request, steps, urgency, time.monotonic()
        self._answer(bundle, worker)

    def _watch(self, worker: int, bundle: _Open, watch: _Watch) -> None:
        if worker in self._failed:
            watch.request.refuse(self._failed[worker])
            return
        bundle.give_up_watch(worker)
        bundle.watching[worker] = watch
        self._answer(bundle, worker)

    def _answer_all(self, by: int = 0) -> None:
        for bundle in self.bundles:
            self._answer(bundle, by)

    def _answer(self, bundle: _Open, by: int) -> None:
        """Reply to every pull that the synchrony now allows. `by` is the worker whose message triggered this; it is
        charged for the wait."""
        if not self._started:
            return
        rounds = bundle.rounds
        for worker, (request, steps, urgency, since) in list(bundle.waiting.items()):
            if bundle.done[worker] >= steps and rounds.may_start(worker):
                del bundle.waiting[worker]
                request.reply(self._read(bundle, worker), priority=urgency)
                bundle.given[worker] = steps
                self.statistics.answered(worker, steps, time.monotonic() - since, by)
        self._answer_watches(bundle, by)
        if bundle is self.bundles[0]:
            self._buffers.answer(lambda worker, steps: bundle.given[worker] >= steps)

    def _answer_watches(self, bundle: _Open, by: int) -> None:
        """Reply to every subscription whose worker has older values than the slowest worker's clock; start the wait of
        a worker that may not start its next step without them."""
        buffers = [self._buffers.now] if bundle is self.bundles[0] else []
        view = bundle.rounds.view
        for worker, watch in list(bundle.watching.items()):
            if bundle.slowest(worker, view) > watch.clock:
                del bundle.watching[worker]
                watch.request.reply([*self._read(bundle, worker), *buffers], priority=watch.urgency)
                if watch.since is not None:
                    self.statistics.answered(worker, bundle.done[worker], time.monotonic() - watch.since, by)
            elif watch.since is None and not self.synchrony.may_start(worker, view):
                watch.since = time.monotonic()

    def _read(self, bundle: _Open, worker: int) -> list[memoryview]:
        """The present version of a bundle, as a reply to a worker."""
        version = bundle.rounds.read(worker)
        values = bundle.snapshot(version)
        self.statistics.sent_bytes += sum(len(part) for part in values)
        slowest = bundle.slowest(worker, bundle.rounds.view)
        about = PULLED.pack(version, slowest, self._buffers.leaving(version))
        return [memoryview(about), *values]

    def _updated(self, worker: int, staleness: int) -> None:
        self.statistics.staleness[worker, staleness] += 1
