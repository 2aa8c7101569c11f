from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft.compression import Bucket, Compressor, Context, State
from weft.compression.dense import Dense
from weft.ops import Flow, Round, Spec

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Only(Compressor):
    """Compresses large parameters only; small ones (biases, norms) are sent dense, where compression gains nothing."""

    inner: Compressor
    """The compressor for large parameters."""
    min_numel: int = 1024
    """The size, in values, from which a parameter is large."""

    @property
    def approximates(self) -> bool:
        return self.inner.approximates

    @property
    def unbiased(self) -> bool:
        return self.inner.unbiased

    def error(self, x: Tensor, spec: Spec) -> float:
        return self.inner.error(x, spec) if spec.numel >= self.min_numel else 0.0

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        small = tuple(piece for piece in bucket.pieces if piece.spec.numel < self.min_numel)
        large = tuple(piece for piece in bucket.pieces if piece.spec.numel >= self.min_numel)
        if small:
            state = yield from Dense().exchange(Bucket(small), state, ctx)
        if large:
            state = yield from self.inner.exchange(Bucket(large), state, ctx)
        return state

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        small = [spec for spec in specs if spec.numel < self.min_numel]
        large = [spec for spec in specs if spec.numel >= self.min_numel]
        first = Dense().rounds(small, workers) if small else ()
        return first + (self.inner.rounds(large, workers) if large else ())
