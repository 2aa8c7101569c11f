"""The model's buffers on a server, and the workers' requests to terminate: both belong to a version of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.transport.messaging import Request


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
        self._waiting: dict[int, tuple[Request, int]] = {}

    def set(self, parts: Sequence[memoryview]) -> None:
        self.now = self._fitting(parts)

    def offer(self, worker: int, parts: Sequence[memoryview], leaving: bool) -> None:
        if leaving:
            self._leaving.add(worker)
        if parts:
            self._offered[worker] = self._fitting(parts)

    def counted(self, worker: int, version: int | None) -> None:
        """A worker's gradients are contributed; `version` is the new version if they closed a round."""
        if version is None:
            return
        for given in self._offered.values():
            self.now = given
        self._offered.clear()
        if self._leaving and self._since is None:
            self._since = version

    def leaving(self, version: int) -> bool:
        return self._since is not None and version >= self._since

    def ask(self, worker: int, request: Request, steps: int) -> None:
        self._waiting[worker] = request, steps

    def give_up(self, worker: int, why: str) -> None:
        if worker in self._waiting:
            self._waiting.pop(worker)[0].refuse(why)

    def answer(self, may: Callable[[int, int], bool]) -> None:
        for worker, (request, steps) in list(self._waiting.items()):
            if may(worker, steps):
                del self._waiting[worker]
                request.reply([self.now])

    def _fitting(self, parts: Sequence[memoryview]) -> memoryview:
        (given,) = parts
        if len(given) != self.nbytes:
            raise ValueError(f"buffers of {len(given)} bytes instead of {self.nbytes}")
        return memoryview(bytes(given))
