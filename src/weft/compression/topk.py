from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from weft.compression import Bucket, Compressor, Context, State
from weft.ops import All, Flow, Round, Spec


@final
@dataclass(frozen=True, kw_only=True)
class Topk(Compressor):
    """Of each parameter only the largest values, with their places [Aji & Heafield 2017; Lin et al. 2018].

    k = ceil(ratio d) values of b bytes and as many 4-byte indices; gathered, so n-1 times that reaches each worker:
    it beats a dense ring while ratio < 2b / (n (b + 4)).
    """

    ratio: float = 0.001
    """The share of each parameter's values that is sent."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is {self.ratio}, but must lie in (0, 1]")

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        counts = [self._k(piece.grad.numel()) for piece in bucket.pieces]
        chosen = [
            piece.grad.abs().topk(k, sorted=False).indices for piece, k in zip(bucket.pieces, counts, strict=True)
        ]
        values = torch.cat([piece.grad[at] for piece, at in zip(bucket.pieces, chosen, strict=True)])
        for piece, at in zip(bucket.pieces, chosen, strict=True):
            if piece.owed is not None:
                if piece.owed.data_ptr() != piece.grad.data_ptr():
                    piece.owed.copy_(piece.grad)
                piece.owed[at] = 0
        payloads = yield All((values, torch.cat(chosen).int()))
        for piece in bucket.pieces:
            piece.mean.zero_()
        for theirs, places in payloads:  # in the order of ranks, so that every replica adds alike
            parts = zip(bucket.pieces, theirs.split(counts), places.split(counts), strict=True)
            for piece, value, at in parts:
                piece.mean.index_add_(0, at, value)
        return state

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        return (Round(All, sum(self._k(spec.numel) * (spec.dtype.itemsize + 4) for spec in specs)),)

    def _k(self, numel: int) -> int:
        return min(numel, math.ceil(self.ratio * numel))
