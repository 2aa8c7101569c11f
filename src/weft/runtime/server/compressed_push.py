"""Compressed pushes: the worker runs an exchange alone, and the server replays it.

The worker runs its compressor's exchange as the only participant, and pushes the payloads. The server runs the same
exchange on a gradient of zeros, with the worker's payloads in place of its own; the resulting mean is the decoded
gradient. A server thus decodes every compressor, without a second description of its payload.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from weft.compression import Bucket, Compressor, Context, Piece, State
from weft.errors import LoopError, PayloadError
from weft.ops import All, Collective, Flow, Payload, Scatter, Sum
from weft.runtime.checks.finite import all_finite


def encode_push(compression: Compressor, piece: Piece, state: State, ctx: Context) -> list[Tensor]:
    """The payloads of one gradient; `piece.mean` becomes their decoded value.

    Raises LoopError if the decoded value of a finite gradient is not finite; `state` then keeps no such value.
    """
    words: list[Tensor] = []

    def answer(op: Collective) -> Any:
        words.extend(part.clone(memory_format=torch.contiguous_format) for part in _payload(op))
        return _alone(op, _payload(op))

    _drive(compression.exchange(Bucket((piece.real(),)), state, ctx), answer)
    if not all_finite(piece.mean):
        for kept in state.get(piece.spec.name, {}).values():
            kept.nan_to_num_(0.0, 0.0, 0.0)
        raise LoopError(
            f"{compression} makes NaN or infinite values of the gradient of {piece.spec.name} at step {ctx.step + 1}. "
            "Use cast(dtype=bf16), which has the range of float32, clip gradients, or lower the learning rate."
        )
    return words


def decode_push(compression: Compressor, words: Iterable[memoryview], piece: Piece, ctx: Context) -> None:
    """Decode the payloads of a worker, the bytes of its tensors in the order of its exchange, into `piece.mean`.

    Raises PayloadError if the compressor cannot have made these payloads; `piece.mean` is then undefined.
    """
    given = iter(words)

    def answer(op: Collective) -> Any:
        mine = _payload(op)
        theirs = list(itertools.islice(given, len(mine)))
        if len(theirs) < len(mine):
            raise PayloadError("a push has fewer parts than its compressor needs")
        return _alone(op, tuple(_tensor(data, like) for data, like in zip(theirs, mine, strict=True)))

    _drive(compression.exchange(Bucket((piece.real(),)), {}, ctx), answer)
    if next(given, None) is not None:
        raise PayloadError("a push has more parts than its compressor needs")


def _drive(flow: Flow[State], answer: Any) -> None:
    result: Any = None
    while True:
        try:
            op = flow.send(result)
        except StopIteration:
            return
        if not isinstance(op, Collective):
            raise LoopError(
                f"A compressor yielded {type(op).__name__}, which a server cannot perform. Use Sum, All or Scatter."
            )
        result = answer(op)


def _payload(op: Collective) -> Payload:
    match op:
        case Sum(payload):
            return (payload,)
        case All(payload):
            return payload
        case Scatter(parts):
            return parts[0]
    raise AssertionError(f"not a collective: {op}")


def _alone(op: Collective, payload: Payload) -> Any:
    """The result of a collective with one participant."""
    return payload[0] if isinstance(op, Sum) else [payload]


def _tensor(data: memoryview, like: Tensor) -> Tensor:
    """Bytes as a tensor of this dtype and shape."""
    if len(data) != like.nbytes:
        raise PayloadError(f"a part of a push has {len(data)} bytes where its compressor needs {like.nbytes}")
    if not len(data):
        return torch.empty_like(like)
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(like.dtype).view(like.shape)
