"""What operations cost: the same flows on sizes alone (tensors on the `meta` device), in simulated time.

Every actor has a full-duplex port. A message of S bytes leaves when the sender's port is free, takes a + S/b, and
occupies the receiver's port for its last S/b seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import WeftError
from weft.ops import All, Collective, Flow, Place, Scatter, Sum
from weft.topology import Topology
from weft.transport._actors import Actors


@dataclass(frozen=True)
class Outcome:
    """What flows returned, when the last one ended, and what each actor sent."""

    results: list[Any]
    seconds: float
    sent_bytes: list[int]


def run(flows: Sequence[Flow[Any]], place: Place) -> Outcome:
    """Run one flow per actor over links of `place`."""
    leaves = [0.0] * len(flows)
    enters = [0.0] * len(flows)

    def deliver(sender: int, receiver: int, size: int, now: float) -> tuple[float, float]:
        wire_s = size / place.bytes_per_s
        leaves[sender] = max(leaves[sender], now) + wire_s
        enters[receiver] = max(leaves[sender] + place.latency_s, enters[receiver] + wire_s)
        return leaves[sender], enters[receiver]

    actors = Actors(flows, deliver, _unlowered)
    results = actors.run()
    return Outcome(results, max(actors.clock), actors.sent_bytes)


def _unlowered(ops: list[Any]) -> list[Any]:
    raise WeftError(f"{type(ops[0]).__name__} has no price before a topology has lowered it")


def cost(topology: Topology, op: type[Collective], numel: int, place: Place) -> Outcome:
    """One collective over `numel` float32 values per worker, lowered by a topology."""

    def intent() -> Collective:
        payload = torch.empty(numel, device="meta")
        if op is Sum:
            return Sum(payload)
        if op is All:
            return All((payload,))
        return Scatter([(part,) for part in payload.tensor_split(place.workers)])

    return run([topology.lower(intent(), me, place) for me in range(place.workers)], place)
