"""A push as a server has received it, decoded and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.compression import Compressor, Context, Piece
from weft.runtime.checks.finite import all_finite
from weft.runtime.server.bundle_state import BundleState
from weft.runtime.server.compressed_push import decode_push
from weft.transport.messaging import Request


@dataclass(frozen=True)
class ReceivedPush:
    """One worker's gradients of a bundle and step; uncompressed ones are in the memory of the message."""

    request: Request
    step: int
    version: int
    """The version that the gradients were computed with."""
    grads: Sequence[Tensor | None]

    def release(self) -> None:
        """Release the memory of the message."""
        if self.request.keeps:
            self.request.release()


def receive_push(
    request: Request, version: int, kept: BundleState, compression: Compressor, ctx: Context, sender: str
) -> ReceivedPush:
    """Decode a push. Raises ValueError or a subclass if it does not fit the bundle, or a gradient is not finite."""
    grads = _decoded(request.parts[1:], kept, compression, ctx)
    for spec, grad in zip(kept.specs, grads, strict=True):
        if grad is not None and not all_finite(grad):
            what = f"the gradient of {spec.name} from {sender} is NaN or infinite at step {ctx.step + 1}"
            raise ValueError(f"{what}; lower the learning rate or scale the loss down")
    request.keeps = compression.raw
    return ReceivedPush(request, ctx.step, version, grads)


def _decoded(
    words: Sequence[memoryview], kept: BundleState, compression: Compressor, ctx: Context
) -> list[Tensor | None]:
    """The gradients of a push; a missing gradient has no payload."""
    if compression.raw:
        return [
            torch.frombuffer(data, dtype=part.dtype).view(part.shape) if len(data) else None
            for part, data in zip(kept.parts, words, strict=True)
        ]
    if not words:
        return [None]
    (part,), (spec,) = kept.parts, kept.specs
    out = torch.zeros(part.numel(), dtype=part.dtype)
    decode_push(compression, words, Piece(spec, torch.zeros_like(out), out), ctx)
    return [out.view(part.shape)]
