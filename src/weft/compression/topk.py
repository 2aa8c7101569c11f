from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft import kernels
from weft.compression import Bucket, Compressor, Context, Piece, State
from weft.compression._sparse import check_places
from weft.lazy import torch
from weft.ops import All, Flow, Round, Spec, nameable

if TYPE_CHECKING:
    from torch import Tensor

_SAMPLE = 16384


@final
@dataclass(frozen=True, kw_only=True)
class Topk(Compressor):
    """Sends only the largest values of each parameter, with their indices [Aji & Heafield 2017; Lin et al. 2018].

    k = ceil(ratio d) values of b bytes and as many 4-byte indices; gathered, so each worker receives n - 1 times that:
    smaller than a dense ring while ratio < 2b / (n (b + 4)).
    """

    ratio: float = 0.001
    """The fraction of each parameter's values that is sent."""
    sampled: bool = False
    """Estimate the threshold from a sample and send up to k values [Lin et al. 2018]; else exactly the k largest."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is {self.ratio}, but must lie in (0, 1]")

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        counts = [self.k(piece.spec.numel) for piece in bucket.pieces]
        first = bucket.pieces[0]
        values = ctx.scratch("values", first, sum(counts), first.grad.dtype)
        places = ctx.scratch("places", first, sum(counts), torch.int32)
        for piece, value, at in zip(bucket.pieces, values.split(counts), places.split(counts), strict=True):
            self._choose(piece, value, at, ctx)
        payloads = yield All((values, places))
        check_places(bucket.pieces, [where for _, where in payloads], [counts] * len(payloads))
        for piece in bucket.pieces:
            piece.mean.zero_()
        for theirs, where in payloads:  # in rank order, so that every replica adds in the same order
            parts = zip(bucket.pieces, theirs.split(counts), where.split(counts), strict=True)
            for piece, value, at in parts:
                fast = kernels.of(piece.mean)
                if fast:
                    fast.sparse_add(at, value, piece.mean)
                else:
                    piece.mean.index_add_(0, at, value)
        return state

    def _choose(self, piece: Piece, values: Tensor, places: Tensor, ctx: Context) -> None:
        """Write a parameter's largest values and their indices, and leave the others in the residual."""
        grad, k = piece.grad, values.numel()
        if grad.is_meta:
            return
        fast = kernels.of(grad)
        if self.sampled and grad.numel() > _SAMPLE:
            found = self._above(grad, places, ctx.key(piece.spec.name))
            values[:found] = grad[places[:found]]
            values[found:], places[found:] = 0, places[0]  # padding: zeros at an index that is sent anyway
        elif fast:
            found = fast.topk_encode(grad, ctx.scratch("candidates", piece, 2 * k + 1024, torch.int32), places, values)
        else:
            found = k
            places.copy_(grad.abs().topk(k, sorted=False).indices.sort().values)
            values.copy_(grad[places])
        if piece.residual is not None:
            if piece.residual.data_ptr() != grad.data_ptr():
                piece.residual.copy_(grad)
            piece.residual[places[:found]] = 0

    def _above(self, grad: Tensor, places: Tensor, key: int) -> int:
        """Write the first indices of values above the sample's threshold; returns their number."""
        stride = grad.numel() // _SAMPLE
        sample = grad[key % stride :: stride].abs()
        bar = sample.topk(max(1, round(self.ratio * sample.numel()))).values[-1]
        fast = kernels.of(grad)
        if fast:
            return int(fast.places_from(grad, bar, places))
        chosen = (grad.abs() >= bar).nonzero().view(-1)[: places.numel()]
        places[: chosen.numel()] = chosen
        return chosen.numel()

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        nameable(specs, 2**31)
        return (Round(All, sum(self.k(spec.numel) * (spec.dtype.itemsize + 4) for spec in specs)),)

    def k(self, numel: int) -> int:
        """The number of values of a parameter that are sent."""
        return min(numel, math.ceil(self.ratio * numel))
