"""The rounds of one bundle on a server, with the pushes and pulls that wait for them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from weft.rounds import Contribution, Rounds
from weft.runtime.server import protocol
from weft.runtime.server.buffers import ServerBuffers
from weft.runtime.server.bundle_state import BundleState
from weft.runtime.server.pending_pulls import REPLACED, PendingPulls
from weft.runtime.server.received_push import ReceivedPush
from weft.runtime.server.statistics import Statistics
from weft.synchrony import View
from weft.transport.messaging import Request
from weft.transport.tensor_bytes import raw


@dataclass
class Subscription:
    """A WATCH request: answered once the slowest worker's clock is beyond `clock`."""

    request: Request
    clock: int
    urgency: int
    since_s: float | None = None
    """Since when its worker has been waiting for the reply."""


class BundleRounds:
    """Forms rounds from a bundle's pushes, and answers its pulls and subscriptions as the synchrony allows.

    `buffers` are answered with the server's first bundle, which has `carries_buffers`.
    """

    def __init__(
        self,
        kept: BundleState,
        rounds: Rounds,
        statistics: Statistics,
        buffers: ServerBuffers,
        *,
        carries_buffers: bool,
    ) -> None:
        self.kept, self.rounds = kept, rounds
        self._statistics, self._buffers, self._carries_buffers = statistics, buffers, carries_buffers
        self.pulls = PendingPulls()
        self.subscriptions: dict[int, Subscription] = {}
        self._arrived: dict[int, ReceivedPush] = {}
        """By worker: a push whose step has not been announced yet."""
        self._used: list[ReceivedPush] = []
        """Pushes whose memory the present round still needs."""
        self._done = [0] * rounds.workers
        """By worker: the number of its steps that were contributed since it joined."""
        self._given = [-1] * rounds.workers
        """By worker: its number of steps at its last read of the model since it joined."""
        self._snapshot: tuple[int, list[memoryview]] | None = None

    # --- members ----------------------------------------------------------------------------------------------------

    def join(self, worker: int) -> None:
        """Count a worker's steps from 0, and drop its pending requests."""
        self._arrived.pop(worker, None)
        self._done[worker], self._given[worker] = 0, -1
        self.refuse(worker)
        self.rounds.join(worker)
        self.rounds.reads[worker] = -1

    def refuse(self, worker: int, why: str = REPLACED) -> None:
        """Refuse all pending requests of a worker."""
        self.pulls.refuse(worker, why)
        self.unsubscribe(worker, why)

    # --- pushes -----------------------------------------------------------------------------------------------------

    def receive(self, worker: int, push: ReceivedPush) -> None:
        """Keep a worker's push until its step is announced."""
        self._arrived[worker] = push

    def contribute(self, worker: int, announced: protocol.Announcement | None) -> bool:
        """Contribute a worker's push to the round if its step was announced; returns whether it was."""
        push = self._arrived.get(worker)
        if push is None or announced is None or push.step != announced.step:
            return False
        self._used.append(self._arrived.pop(worker))
        self.kept.set_numbers(announced.hyper)
        version = self.rounds.version
        self.rounds.contribute(Contribution(worker, announced.share, push.grads, push.version))
        self._done[worker] += 1
        if not self.rounds.round:
            for used in self._used:
                used.release()
            self._used = []
        if self._carries_buffers and self.rounds.version > version:
            self._buffers.updated(self.rounds.version)
        return True

    # --- pulls ------------------------------------------------------------------------------------------------------

    def subscribe(self, worker: int, subscription: Subscription) -> None:
        """Subscribe a worker, in place of its last subscription."""
        self.unsubscribe(worker)
        self.subscriptions[worker] = subscription

    def unsubscribe(self, worker: int, why: str = REPLACED) -> None:
        """Refuse a worker's subscription, if it has one."""
        if worker in self.subscriptions:
            self.subscriptions.pop(worker).request.refuse(why)

    def answer(self, by: int) -> None:
        """Reply to every pull that the synchrony now allows. `by` is the worker whose message triggered this; it is
        charged for the wait."""
        for worker, pull in self.pulls.take(self._may_pull):
            pull.request.reply(self._read(worker), priority=pull.urgency)
            self._given[worker] = pull.steps
            self._statistics.answered(worker, pull.steps, pull.waited_s, by)
        self._answer_subscriptions(by)
        if self._carries_buffers:
            self._buffers.answer(lambda worker, steps: self._given[worker] >= steps)

    def _may_pull(self, worker: int, steps: int) -> bool:
        return self._done[worker] >= steps and self.rounds.may_start(worker)

    def _answer_subscriptions(self, by: int) -> None:
        """Reply to every subscription whose worker has older values than the slowest worker's clock; start the wait of
        a worker that may not start its next step without them."""
        buffers = [self._buffers.now] if self._carries_buffers else []
        view = self.rounds.view
        for worker, each in list(self.subscriptions.items()):
            if self._slowest(worker, view) > each.clock:
                del self.subscriptions[worker]
                each.request.reply([*self._read(worker), *buffers], priority=each.urgency)
                if each.since_s is not None:
                    self._statistics.answered(worker, self._done[worker], time.monotonic() - each.since_s, by)
            elif each.since_s is None and not self.rounds.synchrony.may_start(worker, view):
                each.since_s = time.monotonic()

    def _slowest(self, worker: int, view: View) -> int:
        """The slowest worker's clock, in steps of this worker; a returning worker continues at the slowest's clock."""
        return self._done[worker] - max(0, view.clocks[worker] - view.slowest)

    def _read(self, worker: int) -> list[memoryview]:
        """The present version of the bundle, as a reply to a worker."""
        version = self.rounds.read(worker)
        values = self._values(version)
        self._statistics.sent_bytes += sum(len(part) for part in values)
        slowest = self._slowest(worker, self.rounds.view)
        about = protocol.PULLED.pack(version, slowest, self._buffers.leaving(version))
        return [memoryview(about), *values]

    def _values(self, version: int) -> list[memoryview]:
        """The values of a version. In lockstep the model does not change until all have read it, so it is sent
        uncopied; otherwise all readers of a version share one copy."""
        if self._snapshot is None or self._snapshot[0] != version:
            parts = [part.detach() for part in self.kept.parts]
            copies = parts if self.rounds.synchrony.lockstep else [part.clone() for part in parts]
            self._snapshot = version, [raw(part) for part in copies]
        return self._snapshot[1]
