"""The shard servers of an aggregator, to which it is a single worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from weft.runtime.server import protocol
from weft.runtime.server.client import ServerClient
from weft.runtime.server.protocol import Verb
from weft.transport.messaging import Pending
from weft.transport.tensor_bytes import raw

Then = Callable[[Pending], None]
"""Called with a reply, in a thread of the messaging layer."""


class Upstream:
    """Forwards a group's sums, pulls and other requests to the shard servers; bundles are numbered across all of them.

    The group's gradients are not compressed again.
    """

    def __init__(self, client: ServerClient) -> None:
        self.client = client

    def forward(
        self, number: int, sums: Sequence[Tensor | None], step: int, into: Mapping[str, Tensor], then: Then
    ) -> None:
        """Push the gradients of a bundle, and pull the result."""
        words = [memoryview(b"") if grad is None else raw(grad) for grad in sums]
        self.client.push_bundle(self.client.routes[number], words, step)
        self.pull(number, into, then)

    def pull(self, number: int, into: Mapping[str, Tensor], then: Then) -> None:
        """Pull one bundle as of this step."""
        self.client.pull_bundle(self.client.routes[number], into, then)

    def relay(self, verb: Verb, number: int | None, parts: Sequence[memoryview], then: Then) -> None:
        """Relay a request about a bundle to its server; None: to the first server."""
        server = self.client.clients[0]
        if number is not None and number != protocol.BUFFERS:
            route = self.client.routes[number]
            head = memoryview(protocol.BUNDLE.pack(route.number))
            server, parts = self.client.clients[route.server], [head, *parts[1:]]
        server.ask(verb, parts, once=verb is not Verb.FETCH, then=then)
