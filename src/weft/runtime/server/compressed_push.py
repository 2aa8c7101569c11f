"""How compressed gradients reach a server: a push is an exchange of one worker with nobody, and the server hears it.

The worker runs its compressor's exchange alone; whatever that says to everyone goes to the server. There the same
exchange runs once more, on a gradient of zeros, and is told the worker's words in the place of its own: what it makes
of them is what was sent. So every compressor can be opened by a server, without a second description of its payload.
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
    """What a worker says to everyone about one gradient; `piece.mean` becomes what that comes to.

    Raises LoopError where what a finite gradient comes to is not finite; nothing of that stays in `state`.
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
            f"{compression} makes values that are not finite of the gradient of {piece.spec.name}, at step "
            f"{ctx.step + 1}: use cast(dtype=bf16), which has the range of float32, clip gradients, or lower the "
            "learning rate"
        )
    return words


def decode_push(compression: Compressor, words: Iterable[memoryview], piece: Piece, ctx: Context) -> None:
    """Make `piece.mean` of what a worker said: the bytes of its tensors, in the order in which it said them.

    Raises PayloadError for words that its compressor cannot have said; `piece.mean` is then of no use.
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
            raise LoopError(f"a compressor asked for {type(op).__name__}, which a server cannot give")
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
    """What everyone's words come to where there is one."""
    return payload[0] if isinstance(op, Sum) else [payload]


def _tensor(data: memoryview, like: Tensor) -> Tensor:
    """Bytes as a tensor of that kind and shape."""
    if len(data) != like.nbytes:
        raise PayloadError(f"a part of a push has {len(data)} bytes where its compressor needs {like.nbytes}")
    if not len(data):
        return torch.empty_like(like)
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(like.dtype).view(like.shape)
