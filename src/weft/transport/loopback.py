"""What operations mean: flows of any number of actors on tensors, in one thread, without time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.errors import WeftError
from weft.ops import All, Collective, Flow, Op, Place, Scatter, Sum
from weft.topology import CollectiveTopology
from weft.topology.direct import add_tree
from weft.transport._actors import Actors


def run(flows: Sequence[Flow[Any]]) -> list[Any]:
    """Run one flow per actor to the end and return what each returned."""
    return Actors(flows, deliver=lambda sender, receiver, size, now: (0.0, 0.0), together=meaning).run()


def meaning(ops: Sequence[Any]) -> list[Any]:
    """The definition of the three collectives, given what each worker said."""
    if len({(type(op), tuple(_sizes(op))) for op in ops}) > 1:
        raise WeftError(f"workers state different collectives: {[(type(op).__name__, *_sizes(op)) for op in ops]}")
    match ops[0]:
        case Sum():
            total = add_tree({(r, r + 1): op.payload for r, op in enumerate(ops)}, 0, len(ops))
            return [total.clone() for _ in ops]
        case All():
            return [[op.payload for op in ops] for _ in ops]
        case Scatter():
            return [[op.parts[me] for op in ops] for me in range(len(ops))]
    raise AssertionError(f"not a collective: {ops[0]}")


def _sizes(op: Any) -> list[int]:
    """What must be equal on all workers: a sum's or a gathered payload's sizes, the number of parts."""
    match op:
        case Sum(payload):
            return list(payload.shape)
        case All(payload):
            return [part.numel() for part in payload]
        case Scatter(parts):
            return [len(parts)]
    raise AssertionError(f"not a collective: {op}")


def lowered(flow: Flow[Any], topology: CollectiveTopology, me: int, place: Place) -> Flow[Any]:
    """The same flow with every collective lowered by a topology: the one point where the two compose."""
    op: Op
    result: Any = None
    try:
        while True:
            op = flow.send(result)
            result = (yield from topology.lower(op, me, place)) if isinstance(op, Collective) else (yield op)
    except StopIteration as stop:
        return stop.value
