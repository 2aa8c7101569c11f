from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from weft.compression import Bucket, Compressor, Context, Piece, State
from weft.ops import Flow, Round, Spec, Sum


@final
@dataclass(frozen=True, kw_only=True)
class Powersgd(Compressor):
    """A matrix as the product of two thin ones, by a power iteration from the last step's [Vogels et al. 2019].

    P = sum of M Q, made orthonormal; Q = sum of M'P; the mean is P Q'. Both are summed unopened: rank (rows + columns)
    values. Vectors, and matrices for which that is no less, go whole, with P. Meant to stand in error_feedback.
    """

    rank: int = 4
    """Columns of the thin matrices."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}, but must be at least 1")

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        thin = [piece for piece in bucket.pieces if self._shape(piece.spec)]
        whole = [piece for piece in bucket.pieces if not self._shape(piece.spec)]
        matrices = [piece.grad.view(_matrix(piece.spec)) for piece in thin]
        starts = [self._start(piece, state, ctx) for piece in thin]
        first = [(m @ q).view(-1) for m, q in zip(matrices, starts, strict=True)] + [piece.grad for piece in whole]
        total = yield Sum(torch.cat(first))
        sums = total.split([part.numel() for part in first])
        for piece, mean in zip(whole, sums[len(thin) :], strict=True):
            piece.mean.copy_(mean)
            if piece.owed is not None:
                piece.owed.zero_()
        if not thin:
            return state
        left = [orthonormal(p.view(m.shape[0], -1)) for p, m in zip(sums, matrices, strict=False)]
        mine = [m.T @ p for m, p in zip(matrices, left, strict=True)]
        total = yield Sum(torch.cat([q.reshape(-1) for q in mine]))
        for piece, p, q, right in zip(thin, left, mine, total.split([q.numel() for q in mine]), strict=True):
            if piece.owed is not None:
                torch.sub(piece.grad, (p @ q.T).view(-1), out=piece.owed)
            right = right.view_as(q)
            piece.mean.copy_((p @ right.T).view(-1))
            state.setdefault(piece.spec.name, {})["right"] = right.clone()
        return state

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        shapes = [(self._shape(spec), spec) for spec in specs]
        first = sum((shape[0] * shape[2] if shape else spec.numel) * spec.dtype.itemsize for shape, spec in shapes)
        second = sum(shape[1] * shape[2] * spec.dtype.itemsize for shape, spec in shapes if shape)
        return (Round(Sum, first), Round(Sum, second)) if second else (Round(Sum, first),)

    def _shape(self, spec: Spec) -> tuple[int, int, int] | None:
        """Rows, columns and rank, where that is less than the matrix."""
        rows, columns = _matrix(spec)
        rank = min(self.rank, rows, columns)
        return (rows, columns, rank) if rank * (rows + columns) < rows * columns else None

    def _start(self, piece: Piece, state: State, ctx: Context) -> Tensor:
        shape = self._shape(piece.spec)
        assert shape is not None
        kept = state.get(piece.spec.name, {}).get("right")
        if kept is not None and kept.shape == shape[1:]:
            return kept
        if piece.grad.is_meta:
            return piece.grad.new_empty(shape[1:])
        draw = torch.randn(shape[1:], generator=ctx.generator(piece.spec.name, shared=True))
        return draw.to(piece.grad)


def _matrix(spec: Spec) -> tuple[int, int]:
    """A parameter as a matrix: a row for each output."""
    return (spec.shape[0], math.prod(spec.shape[1:])) if len(spec.shape) > 1 else (1, spec.numel)


def orthonormal(matrix: Tensor) -> Tensor:
    """Its columns, each made orthogonal to those before it (Gram-Schmidt, twice) and of length 1; zero where nothing is
    left."""
    columns: list[Tensor] = []
    for column in matrix.unbind(1):
        size = torch.linalg.vector_norm(column)
        for _ in range(2):
            for done in columns:
                column = column - (done @ column) * done
        left = torch.linalg.vector_norm(column)
        fine = left > 1e-6 * size
        columns.append(torch.where(fine, column / torch.where(fine, left, 1), 0))
    return torch.stack(columns, 1)
