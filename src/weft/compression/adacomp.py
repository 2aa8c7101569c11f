from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from weft.compression import Context, Piece
from weft.compression._sparse import Sparse
from weft.lazy import torch
from weft.ops import Spec

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Adacomp(Sparse):
    """In each bin, sends the values that would exceed the bin's maximum after one more gradient [Chen et al. 2018].

    G = residual + gradient; values with |G + gradient| >= max|G| of their bin are sent, as a sign times the mean of the
    bins' maxima. 4 bytes each, gathered; a few per bin. Use inside error_feedback, which holds the paper's residue.
    """

    signed: ClassVar[bool] = True

    bin: int = 500
    """Values per bin: the paper's L_T, 500 for dense and recurrent layers, 50 for convolutions."""

    def __post_init__(self) -> None:
        if self.bin < 1:
            raise ValueError(f"bin is {self.bin}, but must be at least 1")

    def error(self, x: Tensor, spec: Spec) -> float:
        return float(x.double().norm()) + math.sqrt(x.numel()) * float(x.abs().max())

    def select(self, piece: Piece, ctx: Context) -> tuple[Tensor, Tensor]:
        whole, fresh = piece.grad, piece.fresh if piece.fresh is not None else piece.grad
        padded = torch.nn.functional.pad(whole.abs(), (0, -whole.numel() % self.bin)).view(-1, self.bin)
        most = padded.amax(1)
        scale = most.double().mean().float().to(whole.dtype)
        bar = most.repeat_interleave(self.bin)[: whole.numel()]
        places = (((whole + fresh).abs() >= bar) & (whole != 0)).nonzero().view(-1)
        return places, torch.where(whole[places] < 0, -scale, scale)

    def expected(self, spec: Spec) -> int:
        return min(spec.numel, 5 * -(-spec.numel // self.bin))
