"""The model's buffers on a server, and the workers' requests to terminate: both belong to a version of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.runtime.server.pending_pulls import PendingPulls


class ServerBuffers:
    """The model's buffers, which are worker 0's, and the request of any worker to terminate the run.

    Both take effect with the update that contains the worker's gradients, so that all readers of a version of the model
    see the same.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.now = memoryview(bytes(nbytes))
        self._offered: dict[int, memoryview] = {}
        self._leaving: set[int] = set()
        self._since: int | None = None
        self.pulls = PendingPulls()

    def set(self, parts: Sequence[memoryview]) -> None:
        self.now = self._fitting(parts)

    def offer(self, worker: int, parts: Sequence[memoryview], leaving: bool) -> None:
        if leaving:
            self._leaving.add(worker)
        if parts:
            self._offered[worker] = self._fitting(parts)

    def updated(self, version: int) -> None:
        """Make the offered buffers those of a new version of the model."""
        for given in self._offered.values():
            self.now = given
        self._offered.clear()
        if self._leaving and self._since is None:
            self._since = version

    def leaving(self, version: int) -> bool:
        return self._since is not None and version >= self._since

    def answer(self, ready: Callable[[int, int], bool]) -> None:
        """Reply to the pulls for which `ready(worker, steps)` holds."""
        for _, pull in self.pulls.take(ready):
            pull.request.reply([self.now])

    def _fitting(self, parts: Sequence[memoryview]) -> memoryview:
        (given,) = parts
        if len(given) != self.nbytes:
            raise ValueError(f"buffers of {len(given)} bytes instead of {self.nbytes}")
        return memoryview(bytes(given))
