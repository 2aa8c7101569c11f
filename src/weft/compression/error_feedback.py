from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, final

from weft.compression import Bucket, Compressor, Context, State
from weft.lazy import torch
from weft.ops import Flow, Round, Spec

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Compressor):
    """Adds the part that the inner compressor did not send to the next gradient [Seide et al. 2014].

    Nothing is lost: residual(after) = grad + residual(before) - sent, each rounded once.
    """

    tracks_residual: ClassVar[bool] = True
    has_residual: ClassVar[bool] = True

    inner: Compressor
    """The lossy compressor whose error is fed back."""

    @property
    def unbiased(self) -> bool:
        return False

    def error(self, x: Tensor, spec: Spec) -> float:
        return self.inner.error(x, spec)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        pieces = []
        for piece in bucket.pieces:
            memory = state.setdefault(piece.spec.name, {})
            if "residual" not in memory:
                memory["residual"] = torch.zeros_like(piece.grad)
            owing = replace(piece, residual=memory["residual"], residual_pending=True)
            pieces.append(owing if self.inner.fuses_residual else owing.due())
        return (yield from self.inner.exchange(Bucket(tuple(pieces)), state, ctx))

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        return self.inner.rounds(specs, workers)
