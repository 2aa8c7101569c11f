from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from weft import kernels
from weft.compression import Bucket, Compressor, Context, State
from weft.lazy import torch
from weft.ops import Flow, Round, Spec, Sum

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Cast(Compressor):
    """Rounds gradients to a narrower float: half the bytes, summed without decoding [Micikevicius et al. 2018]."""

    dtype: Literal["bf16", "fp16"] = "bf16"
    """The dtype on the wire: bf16 has the range of float32, fp16 has three more bits of precision."""

    @property
    def _wire_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float16

    def error(self, x: Tensor, spec: Spec) -> float:
        """Half a unit in the last place. The smallest step of fp16 is 2^-24, and beyond 65504 it is infinite."""
        info = torch.finfo(self._wire_dtype)
        if x.abs().max() > info.max:
            return math.inf
        return float(x.double().norm()) * info.eps / 2 + math.sqrt(x.numel()) * info.smallest_normal * info.eps

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        sizes = [piece.grad.numel() for piece in bucket.pieces]
        payload = ctx.scratch("cast", bucket.pieces[0], sum(sizes), self._wire_dtype)
        for piece, part in zip(bucket.pieces, payload.split(sizes), strict=True):
            fast = kernels.of(piece.grad)
            if fast and self.dtype == "bf16":
                fast.bf16_encode(piece.grad, part, piece.residual)
                continue
            part.copy_(piece.grad)
            if piece.residual is not None:
                torch.sub(piece.grad, part, out=piece.residual)
        total = yield Sum(payload)
        for piece, mean in zip(bucket.pieces, total.split(sizes), strict=True):
            piece.mean.copy_(mean)
        return state

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        return (Round(Sum, 2 * sum(spec.numel for spec in specs)),)
