from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft.compression import Context, Piece
from weft.compression._sparse import Sparse
from weft.lazy import torch
from weft.ops import Spec

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Significant(Sparse):
    """Sends only updates that are large relative to the parameter's value [Hsieh et al. 2017; Li et al. 2014].

    |lr x| >= threshold / sqrt(step) |w|: Gaia's filter, whose threshold decreases as updates do. The number of values
    depends on gradient and model; 1 % is assumed. 8 bytes each, gathered. Use inside error_feedback, where small
    changes accumulate until they are significant.
    """

    threshold: float = 0.01
    """The relative change that is significant in the first step."""
    lr: float = 0.1
    """The factor from gradient to update: the learning rate of plain SGD."""

    def __post_init__(self) -> None:
        for name in ("threshold", "lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be a positive number")

    def select(self, piece: Piece, ctx: Context) -> tuple[Tensor, Tensor]:
        passed = piece.grad != 0
        if piece.value is not None:
            bar = piece.value.abs() * (self.threshold / math.sqrt(ctx.step + 1) / self.lr)
            passed &= torch.ge(piece.grad.abs(), bar)
        places = passed.nonzero().view(-1)
        return places, piece.grad[places]

    def expected(self, spec: Spec) -> int:
        return -(-spec.numel // 100)
