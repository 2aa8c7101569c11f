from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from weft.compression import Bucket, Compressor, Context, State
from weft.lazy import torch
from weft.ops import Flow, Round, Spec, Sum

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Dense(Compressor):
    """Sends gradients uncompressed."""

    lossless: ClassVar[bool] = True
    raw: ClassVar[bool] = True

    def error(self, x: Tensor, spec: Spec) -> float:
        return 0.0

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        flat = bucket.flat if bucket.flat is not None else torch.cat([piece.grad for piece in bucket.pieces])
        total = yield Sum(flat)
        if total is not bucket.flat:
            means = total.split([piece.mean.numel() for piece in bucket.pieces])
            for piece, mean in zip(bucket.pieces, means, strict=True):
                piece.mean.copy_(mean)
        for piece in bucket.pieces:
            if piece.residual is not None:
                piece.residual.zero_()
        return state

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        return (Round(Sum, sum(spec.nbytes for spec in specs)),)
