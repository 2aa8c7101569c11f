from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from weft import kernels
from weft.compression import Bucket, Compressor, Context, Piece, State
from weft.lazy import torch
from weft.ops import Flow, Round, Spec, Sum

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Powersgd(Compressor):
    """Approximates a matrix by a low-rank product, by power iteration from the previous step [Vogels et al. 2019].

    P = sum of M Q', orthonormalized; Q = sum of P'M; the mean is P Q. Both are summed without decoding: rank (rows +
    columns) values. Vectors, and matrices that would not shrink, are sent dense together with P. Use inside
    error_feedback.
    """

    fuses_residual: ClassVar[bool] = True

    rank: int = 4
    """The rank of the approximation."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}, but must be at least 1")

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        thin = [piece for piece in bucket.pieces if self._shape(piece.spec)]
        whole = [piece.due() for piece in bucket.pieces if not self._shape(piece.spec)]
        first = [_right(piece, self._start(piece, state, ctx)).view(-1) for piece in thin]
        first += [piece.grad for piece in whole]
        total = yield Sum(torch.cat(first))
        sums = total.split([part.numel() for part in first])
        for piece, mean in zip(whole, sums[len(thin) :], strict=True):
            piece.mean.copy_(mean)
            if piece.residual is not None:
                piece.residual.zero_()
        if not thin:
            return state
        matrices = [_all_of(piece) for piece in thin]
        left = [orthonormal(p.view(m.shape[0], -1)) for p, m in zip(sums, matrices, strict=False)]
        mine = [_left(m, p) for m, p in zip(matrices, left, strict=True)]
        for piece, m, p, q in zip(thin, matrices, left, mine, strict=True):
            if piece.residual is not None:
                _product(p, q, piece.residual.view_as(m), m)
        total = yield Sum(torch.cat([q.view(-1) for q in mine]))
        for piece, p, q, right in zip(thin, left, mine, total.split([q.numel() for q in mine]), strict=True):
            right = right.view_as(q).clone()
            _product(p, right, piece.mean.view(_matrix(piece.spec)))
            state.setdefault(piece.spec.name, {})["right"] = right
        return state

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        shapes = [(self._shape(spec), spec) for spec in specs]
        first = sum((shape[0] * shape[2] if shape else spec.numel) * spec.dtype.itemsize for shape, spec in shapes)
        second = sum(shape[1] * shape[2] * spec.dtype.itemsize for shape, spec in shapes if shape)
        return (Round(Sum, first), Round(Sum, second)) if second else (Round(Sum, first),)

    def _shape(self, spec: Spec) -> tuple[int, int, int] | None:
        """Rows, columns and rank; None if the factors would be no smaller than the matrix."""
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
    """A parameter as a matrix with one row for each output."""
    return (spec.shape[0], math.prod(spec.shape[1:])) if len(spec.shape) > 1 else (1, spec.numel)


def _all_of(piece: Piece) -> Tensor:
    """The value to be sent, after the first product."""
    return (piece.residual if piece.residual is not None and piece.residual_pending else piece.grad).view(
        _matrix(piece.spec)
    )


def _right(piece: Piece, q: Tensor) -> Tensor:
    """The first product. A pending residual is added to the gradient on the way."""
    fast = kernels.of(piece.grad)
    if fast is None:
        m = piece.due().grad.view(_matrix(piece.spec))
        return (m.clone() @ q.T).contiguous()  # the alignment of a matrix changes the last bits of a library's product
    m = piece.grad.view(_matrix(piece.spec))
    p = m.new_empty(m.shape[0], q.shape[0])
    fast.thin_right(m, q, p, piece.residual if piece.residual_pending else None)
    return p


def _left(m: Tensor, p: Tensor) -> Tensor:
    fast = kernels.of(m)
    if fast is None:
        return (p.T @ m.clone()).contiguous()
    q = m.new_empty(p.shape[1], m.shape[1])
    fast.thin_left(m, p, q)
    return q


def _product(p: Tensor, q: Tensor, out: Tensor, taken_from: Tensor | None = None) -> None:
    """p q, with terms added in a fixed order, so that every replica has the same bits; or `taken_from` minus it."""
    fast = kernels.of(out)
    if fast is not None and (taken_from is None or kernels.of(taken_from)):
        fast.thin_product(p, q, out, taken_from)
        return
    total = p[:, :1] * q[:1]
    for k in range(1, p.shape[1]):
        total += p[:, k : k + 1] * q[k : k + 1]
    out.copy_(total if taken_from is None else taken_from - total)


def orthonormal(matrix: Tensor) -> Tensor:
    """The columns of a matrix, orthonormalized one after another; zero where a column depends on earlier ones."""
    if matrix.is_meta:
        return matrix
    wide = matrix.double()
    products = wide.T @ wide
    fast = kernels.of(matrix)
    small = fast.basis(products) if fast and matrix.is_cuda else basis(products)
    return (wide @ small).to(matrix.dtype)


def basis(products: Tensor) -> Tensor:
    """Coefficients that orthonormalize a matrix, from the Gram matrix of its columns: Gram-Schmidt, applied twice.

    In float64, so that a remainder of 10^-6 of a column's length is still told from zero.
    """
    g, rank = products.tolist(), len(products)
    found: list[list[float]] = []
    for k in range(rank):
        column = [float(i == k) for i in range(rank)]
        for _ in range(2):
            image = _times(g, column)
            for done in found:
                share = sum(a * b for a, b in zip(done, image, strict=True))
                column = [a - share * b for a, b in zip(column, done, strict=True)]
        left = sum(a * b for a, b in zip(column, _times(g, column), strict=True))
        scale = left**-0.5 if left > 1e-12 * g[k][k] else 0.0
        found.append([scale * a for a in column])
    return torch.tensor(found, dtype=torch.float64, device=products.device).T.contiguous()


def _times(matrix: list[list[float]], column: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, column, strict=True)) for row in matrix]
