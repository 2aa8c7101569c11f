"""Who takes part at a server: joins, departures and returns of workers."""

from __future__ import annotations

from collections.abc import Sequence

from weft.transport.messaging import Request


class Membership:
    """The workers of a server: which process each of them is, and which of them are gone.

    `groups` are, by worker of this server, the run's workers for which it stands: itself, or an aggregator's group.
    """

    def __init__(self, groups: Sequence[range]) -> None:
        self.groups, self.workers = groups, len(groups)
        self._workers: dict[bytes, int] = {}
        """By process identity: its worker, from its join until it leaves or another process replaces it."""
        self._came: set[int] = set()
        self._gone: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether every worker has joined."""
        return len(self._came) == self.workers

    @property
    def attended(self) -> bool:
        """Whether a worker is present."""
        return len(self._came) > len(self._gone)

    @property
    def awaited_ranks(self) -> set[int]:
        """The run's workers that are not gone; those that have not joined yet are among them."""
        return {rank for worker, group in enumerate(self.groups) if worker not in self._gone for rank in group}

    def join(self, worker: int, identity: bytes) -> None:
        """A process takes part as this worker, in place of any other. Raises ValueError if there is no such worker."""
        if not 0 <= worker < self.workers:
            raise ValueError(f"there is no worker {worker}")
        self._workers = {process: each for process, each in self._workers.items() if each != worker}
        self._workers[identity] = worker
        self._came.add(worker)
        self._gone.discard(worker)

    def worker_of(self, identity: bytes) -> int | None:
        """The worker that a process is; None if it has not joined, has left or was replaced."""
        return self._workers.get(identity)

    def sender(self, request: Request) -> int:
        """The worker that sent a request. Raises ValueError if it has not joined, or another process replaced it."""
        worker = self.worker_of(request.identity)
        if worker is None:
            raise ValueError(f"{request.sender} has not joined, or was replaced while it was away; start it again")
        return worker

    def check(self, worker: int, request: Request) -> bool:
        """Raise ValueError unless this worker sent a request. Returns whether it was gone, and counts it as present."""
        if self.sender(request) != worker:
            raise ValueError(f"{request.sender} sends as worker {worker}, which it is not")
        returned = worker in self._gone
        self._gone.discard(worker)
        return returned

    def leave(self, identity: bytes) -> None:
        """A process ends its part: its later requests are refused."""
        del self._workers[identity]

    def remove(self, worker: int) -> None:
        """Count a worker as gone, until its next request."""
        self._gone.add(worker)

    def worker_for(self, rank: int) -> int:
        """The worker that stands for one of the run's workers; -1 if there is none."""
        return next((worker for worker, group in enumerate(self.groups) if rank in group), -1)

    def describe(self, worker: int) -> str:
        """A worker of this server in words, by ranks."""
        group = self.groups[worker]
        return f"worker {group.start}" if len(group) == 1 else f"one of workers {group.start} to {group.stop - 1}"
