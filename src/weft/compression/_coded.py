"""Compressors with a code of known size that can be decoded on its own: encode, exchange, decode.

Codes cannot be summed before decoding. They travel in one of two ways, by bytes moved (S: the code of one worker):

    gathered      every worker receives every code: (n - 1) S, one round
    two phases    every worker sends each owner its share; the owner decodes, sums and encodes the sum for all:
                  2 (n - 1) / n S, independent of n, two rounds

An owner adds its own values without encoding them, together with its residual of that share, and keeps the encoding
error of the sum as its new residual. Error feedback thus covers both phases with one memory, and no value is rounded
twice.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from weft import kernels
from weft.compression import Bucket, Compressor, Context, Piece, State
from weft.errors import PayloadError
from weft.lazy import torch
from weft.ops import All, Flow, Round, Scatter, Spec

if TYPE_CHECKING:
    from torch import Tensor

A_ROUND = 16 * 1024
"""Bytes that travel in the time of one additional round, attributed to one parameter."""


@dataclass(frozen=True, kw_only=True)
class Coded(Compressor):
    """Encodes one parameter, or a share of it, at a time: flat values and the length of its rows."""

    fuses_residual: ClassVar[bool] = True

    @abstractmethod
    def size(self, count: int, width: int) -> int:
        """Bytes of the code for `count` values in rows of `width`."""

    @abstractmethod
    def encode(
        self, x: Tensor, code: Tensor, width: int, key: int, residual: Tensor | None, pending: bool = False
    ) -> None:
        """Write the code of x, and the encoding error to `residual` if it is not None. `key` seeds random draws.

        `pending`: add the old residual to x first; only where kernels exist for x.
        """

    @abstractmethod
    def decode(self, code: Tensor, out: Tensor, width: int, add: bool) -> None:
        """Decode, and write or add to `out`. The bits are the same on every rank."""

    def grain(self, width: int) -> int:
        """The smallest number of values that a share is cut into."""
        return 8

    def counted(self, x: Tensor) -> Tensor:
        """A worker's own values as they enter a sum."""
        return x

    def settle(self, total: Tensor) -> None:
        """Postprocess the sum in place. By default it is the mean."""

    # --- the exchange -----------------------------------------------------------------------------------------------

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        divided = [piece for piece in bucket.pieces if self._divides(piece.spec, ctx.workers)]
        whole = [piece for piece in bucket.pieces if not self._divides(piece.spec, ctx.workers)]
        shares = [self._shares(piece.spec, ctx.workers) for piece in divided]
        if divided:
            yield from self._sum_mine(divided, shares, ctx)
        mine = max(_sent(shares, ctx.workers), default=0)
        sizes = [self._bytes(piece.spec, piece.spec.numel) for piece in whole]
        code = ctx.scratch("code", bucket.pieces[0], mine + sum(sizes))
        for piece, own, part in _along(divided, shares, ctx.rank, code):
            self._encode_sum(piece, own, part, ctx)
        for piece, part in zip(whole, code[mine:].split(sizes), strict=True):
            self._encode(piece, slice(None), part, ctx.key(piece.spec.name))
        everyone = yield All((code,))
        for rank, (theirs,) in enumerate(everyone):  # in rank order, so that every replica adds in the same order
            for piece, share, part in _along(divided, shares, rank, theirs):
                self._decode(part, piece, share.range, add=False)
            for piece, part in zip(whole, theirs[mine:].split(sizes), strict=True):
                self._decode(part, piece, slice(None), add=rank > 0)
        for piece in whole:
            if not piece.mean.is_meta:
                self.settle(piece.mean)
        return state

    def _sum_mine(self, pieces: Sequence[Piece], shares: Sequence[Sequence[Share]], ctx: Context) -> Flow[None]:
        """The first phase: decode and sum this worker's share of each parameter, in the memory of `mean`."""
        sizes = _sent(shares, ctx.workers)
        parts = ctx.scratch("shares", pieces[0], sum(sizes)).split(sizes)
        for to in (rank for rank in range(ctx.workers) if rank != ctx.rank):
            for piece, share, part in _along(pieces, shares, to, parts[to]):
                self._encode(piece, share.range, part, ctx.key(f"{piece.spec.name}/{to}"))
        got = yield Scatter([(part,) for part in parts])
        for piece, own in zip(pieces, (each[ctx.rank] for each in shares), strict=True):
            self._begin(piece, own.range)
        for theirs in (got[rank] for rank in range(ctx.workers) if rank != ctx.rank):
            for piece, share, part in _along(pieces, shares, ctx.rank, theirs[0]):
                self._decode(part, piece, share.range, add=True)

    def _begin(self, piece: Piece, range: slice) -> None:
        """The first term of a sum: this worker's own values and its residual."""
        mine = piece.grad[range]
        if piece.residual is not None and piece.residual_pending:
            mine = torch.add(mine, piece.residual[range], out=piece.residual[range])
        piece.mean[range].copy_(self.counted(mine))

    def _encode_sum(self, piece: Piece, share: Share, code: Tensor, ctx: Context) -> None:
        total = piece.mean[share.range]
        if not total.numel() or total.is_meta:
            return
        self.settle(total)
        code = code[: self.size(total.numel(), row(piece.spec))]
        residual = piece.residual[share.range] if piece.residual is not None else None
        self.encode(total, code, row(piece.spec), ctx.key(f"{piece.spec.name}/sum"), residual)

    def _encode(self, piece: Piece, range: slice, code: Tensor, key: int) -> None:
        x, residual, pending = (
            piece.grad[range],
            piece.residual[range] if piece.residual is not None else None,
            piece.residual_pending,
        )
        if not x.numel() or x.is_meta:
            return
        if residual is not None and pending and not kernels.of(x):
            x, pending = residual.add_(x), False
        self.encode(x, code[: self.size(x.numel(), row(piece.spec))], row(piece.spec), key, residual, pending)

    def _decode(self, code: Tensor, piece: Piece, range: slice, *, add: bool) -> None:
        out, width = piece.mean[range], row(piece.spec)
        if not out.numel() or out.is_meta:
            return
        size = self.size(out.numel(), width)
        if code.numel() < size:
            raise PayloadError(f"the code of {piece.spec.name} has {code.numel()} bytes instead of {size}")
        self.decode(code[:size], out, width, add)

    # --- sizes ------------------------------------------------------------------------------------------------------

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        shares = [self._shares(spec, workers) for spec in specs if self._divides(spec, workers)]
        whole = sum(self._bytes(spec, spec.numel) for spec in specs if not self._divides(spec, workers))
        if not shares:
            return (Round(All, whole),)
        sent = _sent(shares, workers)
        return Round(Scatter, sum(sent)), Round(All, max(sent) + whole)

    def _divides(self, spec: Spec, workers: int) -> bool:
        """Whether a parameter travels in two phases. Decided per parameter, so that buckets do not change results."""
        gathered = (workers - 1) * self._bytes(spec, spec.numel)
        if gathered <= A_ROUND:
            return False
        sizes = [share.nbytes for share in self._shares(spec, workers)]
        return sum(sizes) - min(sizes) + (workers - 1) * max(sizes) + A_ROUND < gathered

    def _shares(self, spec: Spec, workers: int) -> list[Share]:
        grain = self.grain(row(spec))
        units = -(-spec.numel // grain)
        ends = [min(spec.numel, units * r // workers * grain) for r in range(workers + 1)]
        return [Share(slice(a, b), self._bytes(spec, b - a)) for a, b in itertools.pairwise(ends)]

    def _bytes(self, spec: Spec, count: int) -> int:
        """Codes are padded to a multiple of eight bytes, so that the floats of the next code are aligned."""
        return -(-self.size(count, row(spec)) // 8) * 8 if count else 0


@dataclass(frozen=True)
class Share:
    """The range of a parameter that one worker sums, and the bytes of its code."""

    range: slice
    nbytes: int


def _sent(shares: Sequence[Sequence[Share]], workers: int) -> list[int]:
    """Bytes of the shares of all parameters, for each worker."""
    return [sum(each[to].nbytes for each in shares) for to in range(workers if shares else 0)]


def _along(
    pieces: Sequence[Piece], shares: Sequence[Sequence[Share]], of: int, code: Tensor
) -> Iterator[tuple[Piece, Share, Tensor]]:
    """One worker's shares of all parameters, each with its code; codes are adjacent in memory."""
    at = 0
    for piece, each in zip(pieces, shares, strict=True):
        yield piece, each[of], code[at : at + each[of].nbytes]
        at += each[of].nbytes


def row(spec: Spec) -> int:
    """The length of a parameter's rows: a matrix has one row for each output, a vector is one row."""
    return max(1, math.prod(spec.shape[1:]) if len(spec.shape) > 1 else spec.numel)


def numbers(code: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` floats of a code, and the bytes after them."""
    return code[: 4 * count].view(torch.float32), code[4 * count :]


def put(value: Tensor, out: Tensor, add: bool) -> None:
    """Write or add decoded values, in plain PyTorch."""
    value = value.view(out.shape).to(out.dtype)
    out.add_(value) if add else out.copy_(value)
