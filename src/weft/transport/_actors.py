"""Flows of several actors, run side by side in one thread; the ground on which loopback and virtual time stand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from weft.errors import WeftError
from weft.ops import Ask, Await, Collective, Flow, Issue, Op, Payload, Recv, Reply, Send, Serve, nbytes

Deliver = Callable[[int, int, int, float], tuple[float, float]]
"""(sender, receiver, bytes, now) -> time at which the message has left the sender, and time of its arrival."""
Together = Callable[[list[Any]], list[Any]]
"""One collective intent per actor -> one result per actor."""

_WAIT = object()


class Actors:
    """Runs one flow per actor until all have returned. Results and clocks stand in the order of the actors."""

    def __init__(self, flows: Sequence[Flow[Any]], deliver: Deliver, together: Together) -> None:
        self.flows, self.deliver, self.together = list(flows), deliver, together
        n = len(self.flows)
        self.clock = [0.0] * n
        self.left = [0.0] * n
        self.results: list[Any] = [None] * n
        self.running = set(range(n))
        self.waiting: dict[int, Op] = {}
        self.mail: dict[tuple[int, int], deque[tuple[float, Payload]]] = {}
        self.requests: list[deque[tuple[float, int, Ask]]] = [deque() for _ in range(n)]
        self.replies: dict[tuple[int, int], deque[tuple[float, Payload]]] = {}

    def run(self) -> list[Any]:
        for actor in range(len(self.flows)):
            self._resume(actor, None)
        while self.running:
            # The actor that can act earliest goes first, so that ports and servers see messages in their true order.
            able = [(when, actor) for actor in self.running if (when := self._when(actor)) is not None]
            if able:
                when, actor = min(able)
                self.clock[actor] = max(self.clock[actor], when)
                self._resume(actor, self._result(actor, self.waiting[actor]))
            else:
                self._collective()
        return self.results

    def _resume(self, actor: int, value: Any) -> None:
        """Give an actor its result, and post the message of its next intent."""
        try:
            op = self.waiting[actor] = self.flows[actor].send(value)
        except StopIteration as stop:
            self.results[actor] = stop.value
            self.running.discard(actor)
            self.waiting.pop(actor, None)
            return
        message = op.request if isinstance(op, Issue) else op
        if isinstance(message, (Send, Reply, Ask)):
            self._post(actor, message)

    def _post(self, actor: int, message: Send | Reply | Ask) -> None:
        to, payload = message.to, message.payload
        self.left[actor], arrival = self.deliver(actor, to, nbytes(payload), self.clock[actor])
        if isinstance(message, Send):
            self.mail.setdefault((actor, to), deque()).append((arrival, payload))
        elif isinstance(message, Reply):
            self.replies.setdefault((actor, to), deque()).append((arrival, payload))
        else:
            self.requests[to].append((arrival, actor, message))

    def _when(self, me: int) -> float | None:
        """Time at which the intent that an actor waits on can give its result; None: not as things stand."""
        match self.waiting[me]:
            case Send() | Reply() | Issue():
                return self.left[me]
            case Recv(source, _) if self.mail.get((source, me)):
                return max(self.clock[me], self.mail[source, me][0][0])
            case Ask(to) | Await(to) if self.replies.get((to, me)):
                return max(self.clock[me], self.replies[to, me][0][0])
            case Serve() if self.requests[me]:
                return max(self.clock[me], self.requests[me][0][0])
            case Serve() if all(isinstance(self.waiting[other], Serve) for other in self.running):
                return self.clock[me]
        return None

    def _result(self, me: int, op: Op) -> Any:
        match op:
            case Recv(source, _):
                return self.mail[source, me].popleft()[1]
            case Ask(to) | Await(to):
                return self.replies[to, me].popleft()[1]
            case Serve() if self.requests[me]:
                _, sender, request = self.requests[me].popleft()
                return sender, request
        return None

    def _collective(self) -> None:
        """When every actor states a collective that nobody lowered, it is performed by definition."""
        ops = [self.waiting.get(actor) for actor in range(len(self.flows))]
        if not all(isinstance(op, Collective) for op in ops):
            stuck = {actor: type(op).__name__ for actor, op in self.waiting.items()}
            raise WeftError(f"no actor can go on; each waits: {stuck}")
        for actor, result in enumerate(self.together(ops)):
            self._resume(actor, result)
