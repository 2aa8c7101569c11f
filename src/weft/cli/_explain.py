"""A strategy in words and figures: what each answer means beside the others, and what an exchange costs."""

from __future__ import annotations

from typing import Any, cast

from weft.lazy import torch
from weft.ops import Place, Spec
from weft.optimization import ModelMerging
from weft.strategy import Strategy
from weft.synchrony import View
from weft.topology import CollectiveTopology, ServerTopology

QUESTIONS = {
    "partition": "where the model lives",
    "optimization": "whose optimizer steps",
    "synchrony": "when a worker may start its next step",
    "topology": "who talks to whom",
    "compression": "what goes on the wire",
    "schedule": "in which order it leaves",
}
WORKERS = (2, 4, 8, 16)
"""The numbers of workers for which an exchange is priced."""
EXAMPLE = "25 M float32 parameters (25 matrices of 1000 x 1000)"


def example() -> tuple[Spec, ...]:
    """The parameters of the example."""
    return tuple(Spec(f"layer{number}", (1000, 1000), cast("torch.dtype", _Float32())) for number in range(25))


class _Float32:
    """`torch.float32`, with the properties that sizes depend on at hand: pricing a strategy then imports no torch."""

    itemsize = 4
    is_complex = False

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.float32, name)


def meanings(strategy: Strategy) -> dict[str, str]:
    """One sentence for each axis. Without servers or shared memory it is the answer's own."""
    found = {axis: answer.summary for axis, answer in strategy.answers()}
    if strategy.shares_memory:
        found["partition"] = "All workers train one model, in memory that they share."
        found["optimization"] = "Each worker's optimizer steps that model with the worker's own gradient."
    if strategy.has_servers:
        copies = "trains a copy of it" if strategy.has_local_steps else "computes with a copy of it"
        found["partition"] = f"The servers keep the model, and every worker {copies}."
        if not strategy.has_local_steps:
            found["optimization"] = f"The servers step the optimizer, with {_contributions(strategy)}."
    return found


def _contributions(strategy: Strategy) -> str:
    """The gradients of one update at the servers."""
    workers = 8
    quorum = strategy.synchrony.quorum(View(clocks=(0,) * workers))
    if quorum >= workers:
        return "the mean gradient of all workers"
    if quorum > 1:
        return "the gradients of those workers that are in time"
    return f"the gradient of each {'group' if strategy.server_topology.worker_groups(workers) else 'worker'} on arrival"


def rounds(strategy: Strategy, workers: int) -> int:
    """Messages that follow one another in the exchange of a bucket: the latency terms of the declared cost."""
    topology, place = strategy.topology, Place(workers=workers, latency_s=1.0)
    if isinstance(topology, ServerTopology):
        return round(topology.seconds(strategy.push_bytes(example()), place))
    if not isinstance(topology, CollectiveTopology):
        return 0
    collectives = strategy.compression.rounds(example(), workers)
    return round(sum(topology.seconds(each.op, each.nbytes, place) for each in collectives))


def wire_bytes(strategy: Strategy, workers: int) -> float:
    """Bytes that the busiest worker sends in a step, on average."""
    return strategy.wire_bytes(example(), workers) * strategy.optimization.pushes


def copies(strategy: Strategy) -> int:
    """Tensors of the model's size that a worker holds, besides its gradients and the state of its optimizer."""
    optimization = strategy.optimization
    if isinstance(optimization, ModelMerging):
        return optimization.copies
    if strategy.has_local_steps:
        return 3
    return 2 if _receives_beside_computing(strategy) else 1


def _receives_beside_computing(strategy: Strategy) -> bool:
    """Whether servers send the next step's values while a worker computes with those of the present one."""
    early = strategy.synchrony.lockstep and strategy.schedule.overlaps
    return strategy.has_servers and (early or strategy.synchrony.eager)


def held(strategy: Strategy) -> str:
    """The copies of the model that a worker holds, in a sentence."""
    count, optimization = copies(strategy), strategy.optimization
    if isinstance(optimization, ModelMerging):
        last = "a difference" if count == 3 else "a difference and the state of merges"
        return f"A worker holds {count} copies of the model: its own, the anchor, {last}."
    if strategy.has_local_steps:
        return (
            f"A worker holds {count} copies of the model: its own, one to merge with that of the servers, and "
            "accumulated gradients; one more while these are sent."
        )
    if strategy.shares_memory:
        return "All workers hold 1 copy of the model together."
    if count == 2:
        return "A worker holds 2 copies of the model: the present one, and the values that arrive meanwhile."
    return "A worker holds 1 copy of the model."


def exact(strategy: Strategy) -> bool:
    """Whether results have the same bits for any layout of the run."""
    return strategy.topology.exact and strategy.synchrony.lockstep


def kind(strategy: Strategy) -> str:
    """How reproducible the results are, in one or two sentences."""
    if not strategy.synchrony.lockstep:
        return "Workers do not wait for each other: results depend on the order of arrival, and no run repeats another."
    if exact(strategy):
        return "Results are bit-identical for any number of processes, any buckets and any schedule."
    return (
        "Replicas are identical and a run repeats exactly on the same layout; another number of processes or other "
        "buckets change the last bits. `direct` does not have this limit."
    )
