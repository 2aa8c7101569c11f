"""Prefetching from eager servers: new versions arrive while the worker computes [Dai et al. 2015].

The worker keeps a subscription for each bundle, which the server answers as soon as the slowest worker's clock is
beyond the worker's own values: once per clock, not once per update. Values arrive in separate memory, and `step` copies
them to the parameters; it waits only if the synchrony requires newer values than the worker has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.runtime.loop.buffers import BufferSlots
from weft.runtime.server.bundle_route import BundleRoute
from weft.runtime.server.client import ServerClient, wait_for
from weft.runtime.server.protocol import PULLED
from weft.synchrony import Synchrony, View
from weft.transport.messaging import Pending


def may_go_on(synchrony: Synchrony, clock: int, slowest: int) -> bool:
    """Whether a worker with this clock may start its next step with values from the slowest worker's clock."""
    return synchrony.may_start(0, View(clocks=(clock, slowest)))


@dataclass
class _Standing:
    """The subscription to one bundle, and the header of its reply."""

    route: BundleRoute
    about: bytearray
    reply: Pending


class Prefetcher:
    """The subscriptions of one worker, and the memory of their replies. The tensors of `model` are flat."""

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
        """Worker 0's buffers, in the latest version that has arrived."""
        self._standing: list[_Standing] = []
        self._stepped = False

    def start(self) -> None:
        """Subscribe to all bundles, once the model has been pulled."""
        self._keep(self._slots.tensors)
        self._standing = [self._ask(route) for route in self.client.routes]

    def begin(self, buffers: Sequence[Tensor]) -> None:
        """Begin a step. The pushes of the previous step have arrived by then, and their memory is free.

        `buffers` are the model's, if this worker provides them.
        """
        self._stepped = False
        self.client.pushed(self.timeout_s)
        if buffers:
            self._keep(buffers)

    def step(self) -> None:
        """Apply all arrived values, and wait for those that the synchrony requires."""
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
        """After a step: pull the model with this worker's own updates in it."""
        if self._stepped:
            self._stepped = False
            self.client.pull(self.model, self._slots.tensors).wait(self.timeout_s)
            self._keep(self._slots.tensors)

    def _ask(self, route: BundleRoute) -> _Standing:
        about = bytearray(PULLED.size)
        return _Standing(route, about, self.client.watch(route, about, self._coming, self._coming_buffers))

    def _take(self, came: _Standing) -> None:
        route = came.route
        if PULLED.unpack(came.about) <= PULLED.unpack(route.about):  # `refresh` has pulled newer values
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
