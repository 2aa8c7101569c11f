from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft import kernels
from weft.compression import Bucket, Compressor, Context, Piece, State
from weft.lazy import torch
from weft.ops import Flow, Round, Spec, Sum

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class RandomK(Compressor):
    """Sends values at random indices, the same on every worker, drawn anew in each step [Stich et al. 2018].

    k = ceil(ratio d) values, one from each of k intervals of equal length. A shared seed determines the indices, so
    they are not sent, values are summed without decoding, and traffic does not grow with the number of workers.
    """

    ratio: float = 0.01
    """The fraction of each parameter's values that is sent."""
    scaled: bool = False
    """Scale each value by the length of its interval, so that the result is unbiased; not inside error_feedback."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is {self.ratio}, but must lie in (0, 1]")

    @property
    def approximates(self) -> bool:
        return not self.scaled

    @property
    def unbiased(self) -> bool:
        return self.scaled

    def error(self, x: Tensor, spec: Spec) -> float:
        return float(x.double().norm()) * (max(1.0, math.ceil(1 / self.ratio) - 1) if self.scaled else 1.0)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        chosen = [self._places(piece, ctx) for piece in bucket.pieces]
        values = torch.cat([piece.grad[at] for piece, (at, _) in zip(bucket.pieces, chosen, strict=True)])
        for piece, (at, _) in zip(bucket.pieces, chosen, strict=True):
            if piece.residual is not None:
                if piece.residual.data_ptr() != piece.grad.data_ptr():
                    piece.residual.copy_(piece.grad)
                piece.residual[at] = 0
        total = yield Sum(values)
        means = total.split([at.numel() for at, _ in chosen])
        for piece, (at, lengths), mean in zip(bucket.pieces, chosen, means, strict=True):
            piece.mean.zero_()
            piece.mean[at] = mean * lengths if self.scaled else mean
        return state

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        return (Round(Sum, sum(self._k(spec.numel) * spec.dtype.itemsize for spec in specs)),)

    def _places(self, piece: Piece, ctx: Context) -> tuple[Tensor, Tensor]:
        """One index in each interval, and the lengths of the intervals."""
        count, k = piece.spec.numel, self._k(piece.spec.numel)
        if piece.grad.is_meta:
            return (piece.grad.new_empty(k, dtype=torch.int64),) * 2
        ends = torch.arange(k + 1, device=piece.grad.device) * count // max(1, k)
        lengths = ends.diff()
        draw = kernels.uniform(k, ctx.key(piece.spec.name, shared=True), piece.grad.device).double() * lengths
        return ends[:-1] + draw.long(), lengths

    def _k(self, numel: int) -> int:
        return min(numel, math.ceil(self.ratio * numel))
