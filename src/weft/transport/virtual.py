"""What operations cost: the same flows on sizes alone (tensors on the `meta` device), in simulated time.

Every host has a full-duplex port, and every actor a host of its own unless told otherwise. A message of S bytes leaves
when the sender's port is free, takes a + S/b, and occupies the receiver's port for its last S/b seconds. A message
within a host takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import WeftError
from weft.ops import All, Collective, Flow, Place, Scatter, Sum
from weft.topology import CollectiveTopology, ServerTopology
from weft.transport._actors import Actors
from weft.transport._servers import actor_hosts, server_flows


@dataclass(frozen=True)
class Outcome:
    """What flows returned, the time at which the last one ended, and the bytes that crossed links."""

    results: list[Any]
    seconds: float
    sent_bytes: list[int]
    """By actor: bytes that it sent to other hosts."""
    link_bytes: list[int]
    """By host: bytes that its link carried, in the direction that carried more."""


def run(flows: Sequence[Flow[Any]], place: Place, hosts: Sequence[int] | None = None) -> Outcome:
    """Run one flow per actor over links of `place`; `hosts` names the host of each actor."""
    at = range(len(flows)) if hosts is None else hosts
    ports = 1 + max(at, default=-1)
    leaves, enters = [0.0] * ports, [0.0] * ports
    sent, out, into = [0] * len(flows), [0] * ports, [0] * ports

    def deliver(sender: int, receiver: int, size: int, now: float) -> tuple[float, float]:
        here, there = at[sender], at[receiver]
        if here == there:
            return now, now
        wire_s = size / place.bytes_per_s
        sent[sender] += size
        out[here] += size
        into[there] += size
        leaves[here] = max(leaves[here], now) + wire_s
        enters[there] = max(leaves[here] + place.latency_s, enters[there] + wire_s)
        return leaves[here], enters[there]

    actors = Actors(flows, deliver, _unlowered)
    results = actors.run()
    return Outcome(results, max(actors.clock), sent, [max(both) for both in zip(out, into, strict=True)])


def _unlowered(ops: list[Any]) -> list[Any]:
    raise WeftError(f"{type(ops[0]).__name__} has no price before a topology has lowered it")


def cost(topology: CollectiveTopology | ServerTopology, op: type[Collective], numel: int, place: Place) -> Outcome:
    """One collective over `numel` float32 values per worker, lowered by a topology; servers carry `Sum` alone."""
    n, payload = place.workers, torch.empty(numel, device="meta")
    workers: list[Flow[Any]]
    if isinstance(topology, ServerTopology):
        workers = [topology.lower(Sum(payload), me, place) for me in range(n)]
    else:
        intent: Collective = Sum(payload) if op is Sum else All((payload,))
        if op is Scatter:
            intent = Scatter([(part,) for part in payload.tensor_split(n)])
        workers = [topology.lower(intent, me, place) for me in range(n)]
    outcome = run([*workers, *server_flows(topology, n)], place, actor_hosts(topology, n))
    return Outcome(outcome.results[:n], outcome.seconds, outcome.sent_bytes[:n], outcome.link_bytes)
