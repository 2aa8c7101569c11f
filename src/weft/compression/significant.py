from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from weft.compression import Context, Piece
from weft.compression._sparse import Sparse
from weft.ops import Spec


@final
@dataclass(frozen=True, kw_only=True)
class Significant(Sparse):
    """Only what would change a parameter enough is sent, compared with its value [Hsieh et al. 2017; Li et al. 2014].

    |lr x| >= threshold / sqrt(step) |w|: Gaia's filter, whose threshold shrinks as updates do. How many pass depends on
    gradient and model, 1 % is assumed; 8 bytes for each, gathered. Meant to stand in error_feedback, where small
    changes add up until they count.
    """

    threshold: float = 0.01
    """The relative change that counts in the first step."""
    lr: float = 0.1
    """What turns a gradient into a change: the learning rate of plain SGD."""

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
