from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from weft.compression import Context, Piece
from weft.compression._sparse import Sparse
from weft.ops import Spec

_SAMPLE = 4096


@final
@dataclass(frozen=True, kw_only=True)
class GradientDropping(Sparse):
    """The smallest values are dropped, all but about 1 %; a sample tells where the line runs [Aji & Heafield 2017].

    The threshold is a parameter's own (the paper's local one), the quantile `drop` of |x| in a sample of it. About
    (1 - drop) d values of b bytes with 4-byte places, gathered. Meant to stand in error_feedback.
    """

    drop: float = 0.99
    """The share of values that stay behind (the paper's R)."""

    def __post_init__(self) -> None:
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop is {self.drop}, but must lie in [0, 1)")

    def select(self, piece: Piece, ctx: Context) -> tuple[Tensor, Tensor]:
        size = piece.grad.abs()
        stride = max(1, size.numel() // _SAMPLE)
        sample = size[ctx.key(piece.spec.name) % stride :: stride]
        at = min(sample.numel() - 1, int(self.drop * sample.numel()))
        bar = sample.kthvalue(at + 1).values
        places = ((size >= bar) & (size > 0)).nonzero().view(-1)
        return places, piece.grad[places]

    def expected(self, spec: Spec) -> int:
        return min(spec.numel, -int(-(1 - self.drop) * spec.numel // 1))
