"""The servers of a topology as actors for loopback and virtual time, built on the runtime's rounds (`rounds.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.ops import Flow, Pull, Push, Reply, Serve
from weft.rounds import Contribution, Rounds, mean
from weft.synchrony.bsp import Bsp
from weft.topology import ServerTopology, Topology
from weft.topology._requests import push_and_pull

MakeRounds = Callable[[int], Rounds]
"""The rounds of one server, for so many askers."""


def sum_rounds(askers: int) -> Rounds:
    """Synchronous rounds whose model is the sum of the last round: the meaning of `Sum`."""
    model: list[Tensor] = [torch.empty(0)]

    def update(grads: Sequence[Tensor | None]) -> None:
        model[:] = [grad for grad in grads if grad is not None]

    return Rounds(Bsp(), model, askers, update)


def server_flows(topology: Topology, workers: int, make: MakeRounds = sum_rounds) -> list[Flow[None]]:
    """One flow for each server, in the order of `server_hosts`; they are actors `workers` and up."""
    if not isinstance(topology, ServerTopology):
        return []
    groups = topology.worker_groups(workers)
    shards = range(workers, workers + topology.num_shards(workers))
    aggregators = range(shards.stop, shards.stop + len(groups))
    askers = aggregators or range(workers)
    kept = [_keep(make(len(askers)), askers) for _ in shards]
    return kept + [_forward(group, at, len(groups), shards) for at, group in enumerate(groups)]


def actor_hosts(topology: Topology, workers: int) -> list[int]:
    """The host of each actor: every worker has its own."""
    return [*range(workers), *(topology.server_hosts(workers) if isinstance(topology, ServerTopology) else ())]


def _keep(rounds: Rounds, askers: Sequence[int]) -> Flow[None]:
    """A server of one share. A pull waits until the synchrony lets its worker start the next step."""
    pulls: list[int] = []
    for worker in range(len(askers)):
        rounds.read(worker)  # a run starts with a pull of the first model
    while (request := (yield Serve())) is not None:
        sender, ask = request
        match ask:
            case Push(_, payload):
                rounds.contribute(Contribution(askers.index(sender), 1 / len(askers), payload))
                yield Reply(sender)
            case Pull():
                pulls.append(sender)
            case _:
                raise WeftError(f"a parameter server answers Push and Pull, not {type(ask).__name__}")
        for asker in [each for each in pulls if rounds.may_start(askers.index(each))]:
            pulls.remove(asker)
            rounds.read(askers.index(asker))
            yield Reply(asker, tuple(rounds.model))


def _forward(group: range, me: int, groups: int, shards: Sequence[int]) -> Flow[None]:
    """The aggregator of a group: the sum of its workers' pushes goes to the servers, and their reply to each worker."""
    pushed: dict[int, Contribution] = {}
    pulls: list[int] = []
    while (request := (yield Serve())) is not None:
        sender, ask = request
        if isinstance(ask, Push):
            pushed[sender] = Contribution(sender - group.start, 1 / len(group), ask.payload)
            yield Reply(sender)
        else:
            pulls.append(sender)
        if len(pulls) < len(group):
            continue
        (total,) = mean(list(pushed.values()), len(group))
        assert total is not None
        result = yield from push_and_pull(total, shards, me, groups)
        for worker in pulls:
            yield Reply(worker, (result,))
        pushed, pulls = {}, []
