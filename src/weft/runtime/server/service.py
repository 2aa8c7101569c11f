"""A parameter server: a shard of the model, its optimizer, and replies to the requests of `protocol`.

Each bundle has its own rounds, so that the last layers are updated and pulled while the gradients of the first layers
are still to come. Pushes, joins and leaves take effect once, however often links break.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Sequence

from weft.compression import Compressor, Context
from weft.runtime.server import protocol
from weft.runtime.server.bundle_rounds import BundleRounds, Subscription
from weft.runtime.server.bundle_state import BundleState
from weft.runtime.server.gathers import Gathers
from weft.runtime.server.membership import Membership
from weft.runtime.server.pending_pulls import PendingPull
from weft.runtime.server.protocol import Announcement, Verb
from weft.runtime.server.received_push import receive_push
from weft.runtime.server.request_loop import Loss, RequestLoop
from weft.runtime.server.shard import Shard
from weft.runtime.server.statistics import Statistics
from weft.synchrony import Synchrony
from weft.transport.messaging import Key, Request


class ShardService:
    """Serves one shard of a model until closed. `worker_groups` are those of `Membership`, by default one for each
    worker."""

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
        groups = worker_groups or [range(worker, worker + 1) for worker in range(workers)]
        self.synchrony, self.compression, self.seed, self._lost = synchrony, compression, seed, lost
        self.members = Membership(groups)
        self.statistics = Statistics(len(groups))
        self.shard = Shard(kept, synchrony, len(groups), buffers, self.statistics)
        self._gathers = Gathers(groups[-1].stop)
        self._announced: dict[int, Announcement] = {}
        """By worker: its present step."""
        self._next_steps: dict[int, int] = {}
        self._failed: dict[int, str] = {}
        """By worker: the reason why its gradients were lost."""
        self.over = threading.Event()
        """Set when every worker has joined and left again."""
        self._loop = RequestLoop(
            queue.SimpleQueue(),
            address,
            key,
            name="weft-server",
            serve=self._serve,
            lost=self._remove_lost,
            refused=self._refused,
            statistics=self.statistics,
            max_frame_bytes=6 * max((each.nbytes for each in kept), default=0) + buffers + (1 << 20),
            encrypted=encrypted,
            encrypt_loopback=encrypt_loopback,
            patience_s=patience_s,
        )
        self.address = self._loop.address

    @property
    def bundles(self) -> Sequence[BundleRounds]:
        return self.shard.bundles

    @property
    def version(self) -> int:
        """The number of updates of the first bundle."""
        return self.bundles[0].rounds.version

    @property
    def complete(self) -> bool:
        """Whether every worker has joined."""
        return self.members.complete

    @property
    def attended(self) -> bool:
        """Whether a worker is present."""
        return self.members.attended

    def close(self) -> None:
        """Stop serving."""
        self._loop.close()

    # --- in the serving thread --------------------------------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        match request.verb:
            case Verb.PUSH:
                self._push(request)
            case Verb.BEGIN:
                self._begin(request)
            case Verb.PULL:
                self._pull(request)
            case Verb.WATCH:
                self._watch(request)
            case Verb.JOIN:
                self._join(request)
            case Verb.LEAVE:
                self._leave(request)
            case Verb.SET:
                self._start(request)
            case Verb.FETCH:
                self._fetch(request)
            case Verb.TELL:
                self._tell(request)
            case _:
                request.refuse(f"a parameter server does not support request {request.verb}")

    def _refused(self, request: Request, why: str) -> None:
        """If gradients were lost with a refused request, later pulls of their worker are refused as well."""
        worker = self.members.worker_of(request.identity)
        if worker is None or request.verb not in (Verb.PUSH, Verb.BEGIN):
            return
        self._failed[worker] = why
        self.shard.refuse(worker, why)

    def _check_sender(self, worker: int, request: Request) -> None:
        """Check the sender's worker number; a worker whose link had been lost takes part again."""
        if self.members.check(worker, request):
            self.shard.rejoin(worker)

    # --- joining and leaving ----------------------------------------------------------------------------------------

    def _join(self, request: Request) -> None:
        """A worker joins or rejoins: its pending requests are dropped."""
        (worker,) = protocol.WHO.unpack(request.parts[0])
        self.members.join(worker, request.identity)
        self._announced.pop(worker, None)
        self._failed.pop(worker, None)
        self.shard.join(worker)
        joined = protocol.JOINED.pack(self._next_steps.get(worker, 0), self.shard.started, self._gathers.next)
        request.reply([memoryview(joined)])
        self._gathers.answer(self.members.awaited_ranks)

    def _leave(self, request: Request) -> None:
        (worker,) = protocol.WHO.unpack(request.parts[0])
        self._check_sender(worker, request)
        self.members.leave(request.identity)
        request.reply()
        for bundle in self.bundles:
            bundle.unsubscribe(worker)
        self._remove(worker)
        self._end_if_unattended()

    def _remove_lost(self, loss: Loss) -> None:
        """Remove a lost worker. If it returns, its next request adds it again."""
        worker = self.members.worker_of(loss.identity)
        if worker is None:
            return
        for bundle in self.bundles:
            bundle.pulls.refuse(worker)  # subscriptions stay: they are answered by the next update, or repeated
        if not self.synchrony.lockstep:  # in lockstep the run stops, and the open round is dropped
            self._remove(worker)
        self._lost(loss)
        self._end_if_unattended()

    def _remove(self, worker: int) -> None:
        """No longer wait for a worker."""
        self.members.remove(worker)
        self.shard.leave(worker)
        self._gathers.answer(self.members.awaited_ranks)

    def _end_if_unattended(self) -> None:
        if self.complete and not self.attended:
            self.over.set()

    # --- the model's state, and values of all workers ---------------------------------------------------------------

    def _start(self, request: Request) -> None:
        """Set the initial values of a bundle, or of the buffers."""
        (number,) = protocol.BUNDLE.unpack(request.parts[0])
        self.members.sender(request)
        self.shard.set(number, request.parts[1:])
        request.reply()
        self.shard.answer_all()

    def _fetch(self, request: Request) -> None:
        (number,) = protocol.BUNDLE.unpack(request.parts[0])
        self.members.sender(request)
        request.reply(protocol.packed(self.shard.bundle(number).kept.state()))

    def _tell(self, request: Request) -> None:
        rank, number = protocol.TELL.unpack(request.parts[0])
        self._check_sender(self.members.worker_for(rank), request)
        self._gathers.add(number, rank, request, json.loads(bytes(request.parts[1])))
        self._gathers.answer(self.members.awaited_ranks)

    # --- training ---------------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> None:
        announced = Announcement.unpack(request.parts)
        worker = announced.worker
        self._check_sender(worker, request)
        self._announced[worker] = announced
        self._next_steps[worker] = announced.step + 1
        self.shard.buffers.offer(worker, announced.buffers, announced.leaving)
        request.reply(priority=protocol.AT_ONCE)
        for bundle in self.bundles:
            self._contribute(worker, bundle)

    def _push(self, request: Request) -> None:
        worker, number, step, version = protocol.PUSH.unpack(request.parts[0])
        self._check_sender(worker, request)
        bundle = self.shard.bundle(number)
        self.statistics.received_bytes += sum(len(word) for word in request.parts[1:])
        ctx = Context(step=step, rank=worker, workers=1, seed=self.seed)
        sender = self.members.describe(worker)
        bundle.receive(worker, receive_push(request, version, bundle.kept, self.compression, ctx, sender))
        request.reply(priority=protocol.AT_ONCE)
        self._contribute(worker, bundle)

    def _contribute(self, worker: int, bundle: BundleRounds) -> None:
        if bundle.contribute(worker, self._announced.get(worker)):
            self.shard.answer(bundle, worker)

    def _pull(self, request: Request) -> None:
        worker, number, steps, urgency = protocol.PULL.unpack(request.parts[0])
        self._check_sender(worker, request)
        if worker in self._failed:
            request.refuse(self._failed[worker])
            return
        pulls, bundle = self.shard.pulls(number)
        pulls.add(worker, PendingPull(request, steps, urgency))
        self.shard.answer(bundle, worker)

    def _watch(self, request: Request) -> None:
        worker, number, clock, urgency = protocol.WATCH.unpack(request.parts[0])
        self._check_sender(worker, request)
        if worker in self._failed:
            request.refuse(self._failed[worker])
            return
        bundle = self.shard.bundle(number)
        bundle.subscribe(worker, Subscription(request, clock, urgency))
        self.shard.answer(bundle, worker)
