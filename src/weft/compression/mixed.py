from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, final

from weft.compression import Bucket, Compressor, Context, Piece, State
from weft.compression.dense import Dense
from weft.ops import Flow, Round, Spec

if TYPE_CHECKING:
    from torch import Tensor

Has = TypeVar("Has", Piece, Spec)


@final
@dataclass(frozen=True, kw_only=True)
class Mixed(Compressor):
    """Uses a separate compressor for each kind of layer, by the shape of the parameter [Chen et al. 2018].

    Matrices are dense and recurrent layers and embeddings, kernels are convolutions, vectors are biases and norms. Each
    kind in a bucket has its own rounds, one after the other.
    """

    matrices: Compressor
    """For parameters of two dimensions."""
    kernels: Compressor = Dense()
    """For parameters of three or more dimensions."""
    vectors: Compressor = Dense()
    """For parameters of one dimension or none."""

    @property
    def unbiased(self) -> bool:
        return all(each.unbiased for each in (self.matrices, self.kernels, self.vectors))

    @property
    def approximates(self) -> bool:
        return all(each.approximates for each in (self.matrices, self.kernels, self.vectors))

    def error(self, x: Tensor, spec: Spec) -> float:
        return self._of(spec).error(x, spec)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        for compressor, pieces in self._kinds([(piece.spec, piece) for piece in bucket.pieces]):
            state = yield from compressor.exchange(Bucket(tuple(pieces)), state, ctx)
        return state

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        kinds = self._kinds([(spec, spec) for spec in specs])
        return tuple(each for compressor, inside in kinds for each in compressor.rounds(inside, workers))

    def _of(self, spec: Spec) -> Compressor:
        return (self.vectors, self.vectors, self.matrices, self.kernels)[min(3, len(spec.shape))]

    def _kinds(self, items: Sequence[tuple[Spec, Has]]) -> Iterator[tuple[Compressor, list[Has]]]:
        for dimensions in ((0, 1), (2,), range(3, 99)):
            inside = [(spec, item) for spec, item in items if len(spec.shape) in dimensions]
            if inside:
                yield self._of(inside[0][0]), [item for _, item in inside]
