from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch

from weft.compression import Bucket, Compressor, Context, State
from weft.ops import Flow, Round, Spec, Sum

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True, kw_only=True)
class Cast(Compressor):
    """Gradients rounded to a narrower float: half the bytes, summed unopened [Micikevicius et al. 2018]."""

    dtype: Literal["bf16", "fp16"] = "bf16"
    """What goes on the wire: bf16 keeps the range of float32, fp16 three more bits of precision."""

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        sizes = [piece.grad.numel() for piece in bucket.pieces]
        payload = torch.empty(sum(sizes), dtype=_DTYPES[self.dtype], device=bucket.pieces[0].grad.device)
        for piece, part in zip(bucket.pieces, payload.split(sizes), strict=True):
            part.copy_(piece.grad)
            if piece.owed is not None:
                torch.sub(piece.grad, part, out=piece.owed)
        total = yield Sum(payload)
        for piece, mean in zip(bucket.pieces, total.split(sizes), strict=True):
            piece.mean.copy_(mean)
        return state

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        return (Round(Sum, 2 * sum(spec.numel for spec in specs)),)
