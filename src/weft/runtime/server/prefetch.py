"""A worker among eager servers: what is new comes by itself while it computes [Dai et al. 2015].

It leaves a standing request for each bundle, which the server answers as soon as the slowest worker's clock is beyond
what this one has: once a clock, and not once an update. What comes lies beside the parameters until `step` moves it
there; `step` waits only where the synchrony would not let the worker go on with what it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.runtime.loop.buffers import BufferSlots
from weft.runtime.server.client import BundleRoute, ServerClient, wait_for
from weft.runtime.server.protocol import PULLED
from weft.synchrony import Synchrony, View
from weft.transport.messaging import Pending


def may_go_on(synchrony: Synchrony, clock: int, slowest: int) -> bool:
    """Whether a worker of this clock may go on with values that came when the slowest had finished so many steps."""
    return synchrony.may_start(0, View(clocks=(clock, slowest)))


@dataclass
class _Standing:
    """What was asked for of one bundle, and what its server will say about it."""

    route: BundleRoute
    about: bytearray
    reply: Pending


class Prefetcher:
    """One worker's standing requests, and the memory that they come to. The tensors of `model` are flat."""

    def __init__(
        self,
        client: ServerClient,
        synchrony: Synchrony,
        model: Mapping[str, Tensor],
        slots: BufferSlots,
        timeout_s: float,
    ) -> None:
        self.client, self.synchrony, self.timeout_s = client, synchrony, timeout_s
        self.model, self._slots = model, slots
        self._coming = {name: torch.empty_like(flat) for name, flat in model.items()}
        self._coming_buffers = [torch.empty(buffer.shape, dtype=buffer.dtype) for buffer in slots.tensors]
        self._kept = [buffer.clone() for buffer in slots.tensors]
        """Worker 0's buffers, as far as they are known here."""
        self._standing: list[_Standing] = []
        self._stepped = False

    def start(self) -> None:
        """The model has been read; from here on what is new comes by itself."""
        self._keep(self._slots.tensors)
        self._standing = [self._ask(route) for route in self.client.routes]

    def begin(self, buffers: Sequence[Tensor]) -> None:
        """A step's gradients will be pushed; by then those of the step before have arrived, and their memory is free.

        `buffers` are the model's, where they are this worker's.
        """
        self._stepped = False
        self.client.pushed(self.timeout_s)
        if buffers:
            self._keep(buffers)

    def step(self) -> None:
        """Take what has come, and wait for what this worker may not go on without."""
        for number, each in enumerate(self._standing):
            route = each.route
            while each.reply.done(0.0) or not may_go_on(self.synchrony, self.client.steps, route.slowest):
                wait_for(each.reply, self.client.clients, self.timeout_s)
                self._take(each)
                each = self._standing[number] = self._ask(route)
        for buffer, kept in zip(self._slots.tensors, self._kept, strict=True):
            buffer.copy_(kept)
        self._stepped = True

    def refresh(self) -> None:
        """After a step: have the model with this worker's own updates in it."""
        if self._stepped:
            self._stepped = False
            self.client.pull(self.model, self._slots.tensors).wait(self.timeout_s)
            self._keep(self._slots.tensors)

    def _ask(self, route: BundleRoute) -> _Standing:
        about = bytearray(PULLED.size)
        return _Standing(route, about, self.client.watch(route, about, self._coming, self._coming_buffers))

    def _take(self, came: _Standing) -> None:
        route = came.route
        if PULLED.unpack(came.about) <= PULLED.unpack(route.about):  # `refresh` has brought newer values
            return
        for part in route.bundle:
            here = slice(part.start, part.stop)
            self.model[part.name][here].copy_(self._coming[part.name][here])
        route.about = came.about
        if route is self.client.routes[0] and self.client.worker != 0:
            self._keep(self._coming_buffers)

    def _keep(self, buffers: Sequence[Tensor]) -> None:
        for kept, buffer in zip(self._kept, buffers, strict=True):
            kept.copy_(buffer)
