from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from weft.compression import Bucket, Compressor, Context, State
from weft.ops import Flow, Round, Spec


@final
@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Compressor):
    """What the inner compressor did not send is owed, and added to the next gradient [Seide et al. 2014].

    Nothing is lost: owed(after) = grad + owed(before) - sent, each rounded once; but for what `decay` forgets.
    """

    keeps_account: ClassVar[bool] = True
    owes: ClassVar[bool] = True

    inner: Compressor
    """The lossy compressor to be made up for."""
    decay: float = 1.0
    """What is left of a debt a step later; less than 1 forgets what could not be sent for long [Wu et al. 2018]."""

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay is {self.decay}, but must lie in (0, 1]")

    @property
    def unbiased(self) -> bool:
        return False

    def error(self, x: Tensor, spec: Spec) -> float:
        return self.inner.error(x, spec)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        pieces = []
        for piece in bucket.pieces:
            memory = state.setdefault(piece.spec.name, {})
            if "owed" not in memory:
                memory["owed"] = torch.zeros_like(piece.grad)
            if self.decay != 1.0:
                memory["owed"].mul_(self.decay)
            owing = replace(piece, owed=memory["owed"], behind=True)
            pieces.append(owing if self.inner.adds_up else owing.due())
        return (yield from self.inner.exchange(Bucket(tuple(pieces)), state, ctx))

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        return self.inner.rounds(specs, workers)
