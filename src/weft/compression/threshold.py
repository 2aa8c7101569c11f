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
class Threshold(Sparse):
    """Sends only values beyond a fixed threshold, as the threshold with their sign [Strom 2015].

    4 bytes each: an index and a sign. Their number depends on the gradient; 1 % is assumed. They are gathered, so each
    worker receives n - 1 times as much. Use inside error_feedback, where small values accumulate.
    """

    signed: ClassVar[bool] = True

    tau: float = 0.01
    """The threshold, which is also the magnitude that is sent."""

    def __post_init__(self) -> None:
        if not 0 < self.tau < math.inf:
            raise ValueError(f"tau is {self.tau}, but must be a positive number")

    def error(self, x: Tensor, spec: Spec) -> float:
        return float(x.double().abs().clamp(min=self.tau).norm())

    def select(self, piece: Piece, ctx: Context) -> tuple[Tensor, Tensor]:
        places = (piece.grad.abs() >= self.tau).nonzero().view(-1)
        tau = torch.tensor(self.tau, dtype=torch.float32, device=piece.grad.device).to(piece.grad.dtype)
        return places, torch.where(piece.grad[places] < 0, -tau, tau)

    def expected(self, spec: Spec) -> int:
        return -(-spec.numel // 100)
