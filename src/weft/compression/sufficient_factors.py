from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from weft import kernels
from weft.compression import Bucket, Compressor, Context, Piece, State
from weft.errors import PayloadError
from weft.lazy import torch
from weft.ops import All, Flow, Round, Spec, Sum

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class SufficientFactors(Compressor):
    """Sends a linear layer's gradient as the two factors of its product [Xie et al. 2016; Chilimbi et al. 2014].

    The gradient is G'X, with G the gradient of the layer's outputs and X its inputs, one row per sample. Factors are
    gathered where they are smaller than a dense sum, n b (rows + columns) < 2 rows columns for batches of b, and every
    worker multiplies them; other gradients are sent dense. Exact up to the order of additions. A layer must run once in
    a step. Each worker checks G'X against its gradient with a random vector [Freivalds 1977]; if one check fails, all
    send that gradient dense.
    """

    lossless: ClassVar[bool] = True
    factors: ClassVar[bool] = True

    batch: int = 32
    """Rows of a worker's factors, for planning only; the sent factors have the actual number of rows."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch is {self.batch}, but must be at least 1")

    def error(self, x: Tensor, spec: Spec) -> float:
        return 0.0

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        pieces = bucket.pieces
        mine = [self._rows(piece, ctx) for piece in pieces]
        everyone = yield All((torch.tensor(mine, dtype=torch.int32, device=pieces[0].grad.device),))
        counts = [mine if theirs.is_meta else _counted(pieces, theirs) for (theirs,) in everyone]
        rows = [max(each) if min(each) >= 0 else -1 for each in zip(*counts, strict=True)]
        thin = [(p, b) for p, b in zip(pieces, rows, strict=True) if b >= 0 and _pays(p.spec, b, ctx.workers)]
        names = {piece.spec.name for piece, _ in thin}
        dense = [piece for piece in pieces if piece.spec.name not in names]
        sizes = [b * sum(piece.spec.shape) for piece, b in thin]
        gathered = yield All((_joined([_padded(piece, b) for piece, b in thin], pieces[0].grad),))
        parts = [payload.split(sizes) for (payload,) in gathered]
        total = yield Sum(_joined([piece.grad for piece in dense], pieces[0].grad))
        for number, (piece, b) in enumerate(thin):
            height, width = piece.spec.shape
            left = torch.stack([part[number][: b * height] for part in parts]).view(-1, height)
            right = torch.stack([part[number][b * height :] for part in parts]).view(-1, width)
            torch.mm(left.T, right, out=piece.mean.view(height, width))
        for piece, mean in zip(dense, total.split([piece.grad.numel() for piece in dense]), strict=True):
            piece.mean.copy_(mean)
            if piece.residual is not None:
                piece.residual.zero_()
        return state

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        whole = sum(spec.nbytes for spec in specs)
        thin = [spec for spec in specs if len(spec.shape) == 2 and _pays(spec, self.batch, workers)]
        factors = sum(self.batch * sum(spec.shape) * spec.dtype.itemsize for spec in thin)
        return (
            Round(All, 4 * len(specs)),
            Round(All, factors, bound=2 * whole // workers),
            Round(Sum, whole - sum(spec.nbytes for spec in thin), bound=whole),
        )

    def _rows(self, piece: Piece, ctx: Context) -> int:
        """The number of rows of a parameter's factors here; -1 if its gradient is not their product."""
        if piece.grad.is_meta:
            return self.batch if len(piece.spec.shape) == 2 else -1
        tolerance = _tolerance(piece.grad.dtype)
        if piece.factors is None or piece.residual is not None or tolerance is None:
            return -1
        left, right = piece.factors
        if left.dtype is not piece.grad.dtype or right.dtype is not piece.grad.dtype:
            return -1
        probe = kernels.uniform(right.shape[1], ctx.key(piece.spec.name), right.device).to(right.dtype) - 0.5
        off = (piece.grad.view(piece.spec.shape) @ probe - left.T @ (right @ probe)).abs()
        most = left.abs().T @ (right.abs() @ probe.abs())
        return len(left) if bool((off <= tolerance * most).all()) else -1


def _tolerance(dtype: torch.dtype) -> float | None:
    """The rounding error of a product, relative to the sum of its absolute terms; None: factors are not used."""
    return {torch.float32: 1e-5, torch.float64: 1e-13}.get(dtype)


def _counted(pieces: Sequence[Piece], counts: Tensor) -> list[int]:
    """The number of rows of a worker's factors, by parameter; only a matrix has factors."""
    found: list[int] = counts.tolist()
    for piece, rows in zip(pieces, found, strict=True):
        if rows >= 0 and len(piece.spec.shape) != 2:
            raise PayloadError(f"a payload announces factors of {piece.spec.name}, which is not a matrix")
    return found


def _pays(spec: Spec, batch: int, workers: int) -> bool:
    return workers * batch * sum(spec.shape) < 2 * spec.numel


def _padded(piece: Piece, rows: int) -> Tensor:
    """Both factors, padded to this number of rows."""
    if piece.factors is None:
        return piece.grad.new_empty(rows * sum(piece.spec.shape))
    more = rows - len(piece.factors[0])
    return torch.cat([torch.nn.functional.pad(factor, (0, 0, 0, more)).reshape(-1) for factor in piece.factors])


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else like.new_empty(0)
