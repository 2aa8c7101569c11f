from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft.compression import Context, Piece
from weft.compression._sparse import Sparse
from weft.ops import Spec

if TYPE_CHECKING:
    from torch import Tensor

_SAMPLE = 4096


@final
@dataclass(frozen=True, kw_only=True)
class GradientDropping(Sparse):
    """Drops all but the largest values, about 1 %; a sample sets the threshold [Aji & Heafield 2017].

    Each parameter has its own threshold (the paper's local one): the quantile `drop` of |x| in a sample. About
    (1 - drop) d values of b bytes with 4-byte indices, gathered. Use inside error_feedback.
    """

    drop: float = 0.99
    """The fraction of values that is dropped (the paper's R)."""

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
