from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from weft import kernels
from weft.compression import Bucket, Compressor, Context, Piece, State
from weft.ops import Flow, Round, Spec, Sum


@final
@dataclass(frozen=True, kw_only=True)
class Powersgd(Compressor):
    """A matrix as the product of two thin ones, by a power iteration from the last step's [Vogels et al. 2019].

    P = sum of M Q', made orthonormal; Q = sum of P'M; the mean is P Q. Both are summed unopened: rank (rows + columns)
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
        first = [_right(m, q).view(-1) for m, q in zip(matrices, starts, strict=True)] + [piece.grad for piece in whole]
        total = yield Sum(torch.cat(first))
        sums = total.split([part.numel() for part in first])
        for piece, mean in zip(whole, sums[len(thin) :], strict=True):
            piece.mean.copy_(mean)
            if piece.owed is not None:
                piece.owed.zero_()
        if not thin:
            return state
        left = [orthonormal(p.view(m.shape[0], -1)) for p, m in zip(sums, matrices, strict=False)]
        mine = [_left(m, p) for m, p in zip(matrices, left, strict=True)]
        total = yield Sum(torch.cat([q.view(-1) for q in mine]))
        for piece, m, p, q, right in zip(
            thin, matrices, left, mine, total.split([q.numel() for q in mine]), strict=True
        ):
            if piece.owed is not None:
                _product(p, q, piece.owed.view_as(m), m)
            right = right.view_as(q).clone()
            _product(p, right, piece.mean.view_as(m))
            state.setdefault(piece.spec.name, {})["right"] = right
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
        if kept is not None and kept.shape == (shape[2], shape[1]):
            return kept
        if piece.grad.is_meta:
            return piece.grad.new_empty(shape[2], shape[1])
        draw = torch.randn(shape[2], shape[1], generator=ctx.generator(piece.spec.name, shared=True))
        return draw.to(piece.grad)


def _matrix(spec: Spec) -> tuple[int, int]:
    """A parameter as a matrix: a row for each output."""
    return (spec.shape[0], math.prod(spec.shape[1:])) if len(spec.shape) > 1 else (1, spec.numel)


def _right(m: Tensor, q: Tensor) -> Tensor:
    fast = kernels.of(m)
    if fast is None:
        return (m.clone() @ q.T).contiguous()  # where a matrix lies changes a library's last bits
    p = m.new_empty(m.shape[0], q.shape[0])
    fast.thin_right(m, q, p)
    return p


def _left(m: Tensor, p: Tensor) -> Tensor:
    fast = kernels.of(m)
    if fast is None:
        return (p.T @ m.clone()).contiguous()
    q = m.new_empty(p.shape[1], m.shape[1])
    fast.thin_left(m, p, q)
    return q


def _product(p: Tensor, q: Tensor, out: Tensor, taken_from: Tensor | None = None) -> None:
    """p q, its terms added in one order, so that every replica has the same bits; or what is left without it."""
    fast = kernels.of(out)
    if fast is not None and (taken_from is None or kernels.of(taken_from)):
        fast.thin_product(p, q, out, taken_from)
        return
    total = p[:, :1] * q[:1]
    for k in range(1, p.shape[1]):
        total += p[:, k : k + 1] * q[k : k + 1]
    out.copy_(total if taken_from is None else taken_from - total)


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
    return torch.stack(columns, 1).contiguous()
