"""The pulls of a bundle, or of the model's buffers, that a server has not answered yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from weft.transport.messaging import Request

REPLACED = "the request was repeated, or its worker was lost"


@dataclass(frozen=True)
class PendingPull:
    """A pull without a reply."""

    request: Request
    steps: int
    """The number of the worker's steps that its reply contains."""
    urgency: int
    since_s: float = field(default_factory=time.monotonic)

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.since_s


class PendingPulls:
    """At most one pending pull of each worker."""

    def __init__(self) -> None:
        self._pulls: dict[int, PendingPull] = {}

    def add(self, worker: int, pull: PendingPull) -> None:
        """Add a pull in place of the worker's last one, if that is still pending."""
        self.refuse(worker)
        self._pulls[worker] = pull

    def refuse(self, worker: int, why: str = REPLACED) -> None:
        """Refuse a worker's pull, if it has one."""
        if worker in self._pulls:
            self._pulls.pop(worker).request.refuse(why)

    def take(self, ready: Callable[[int, int], bool]) -> Iterator[tuple[int, PendingPull]]:
        """Remove the pulls for which `ready(worker, steps)` holds.

        Each is decided when the caller has answered those before it, since replies may change what is ready.
        """
        for worker, pull in list(self._pulls.items()):
            if ready(worker, pull.steps):
                del self._pulls[worker]
                yield worker, pull
