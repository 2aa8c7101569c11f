"""Compressors that send a varying number of values with their indices: first the counts, then the payloads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from weft.compression import Bucket, Compressor, Context, Piece, State
from weft.errors import PayloadError
from weft.lazy import torch
from weft.ops import All, Flow, Round, Spec, nameable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sparse(Compressor):
    """Gathers the values of all workers. If all values of a parameter have one magnitude, index and sign suffice."""

    signed: ClassVar[bool] = False
    """Whether all values of a parameter are plus or minus one number."""

    @abstractmethod
    def select(self, piece: Piece, ctx: Context) -> tuple[Tensor, Tensor]:
        """Indices in ascending order, and the value that is sent for each."""

    @abstractmethod
    def expected(self, spec: Spec) -> int:
        """The expected number of values."""

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        pieces = bucket.pieces
        chosen = [self._chosen(piece, ctx) for piece in pieces]
        mine = [places.numel() for places, _ in chosen]
        counts = torch.tensor(mine, dtype=torch.int32, device=pieces[0].grad.device)
        heads = yield All((counts, self._scales(chosen)))
        each = [mine if theirs.is_meta else counted(pieces, theirs) for theirs, _ in heads]
        scratch = max(map(sum, each))
        everyone = yield All(self._payload(chosen, scratch))
        check_places(pieces, [self._places(payload) for payload in everyone], each)
        for piece in pieces:
            piece.mean.zero_()
        for (_, scales), lengths, payload in zip(heads, each, everyone, strict=True):  # in rank order
            self._add(pieces, lengths, scales, payload)
        return state

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        nameable(specs, 2**30 if self.signed else 2**31)
        width = 4 if self.signed else 4 + specs[0].dtype.itemsize
        likely, most = (sum(count(spec) for spec in specs) * width for count in (self.expected, lambda s: s.numel))
        return Round(All, (8 if self.signed else 4) * len(specs)), Round(All, likely, bound=most)

    def _chosen(self, piece: Piece, ctx: Context) -> tuple[Tensor, Tensor]:
        if piece.grad.is_meta or not piece.grad.numel():
            count = min(self.expected(piece.spec), piece.grad.numel())
            return piece.grad.new_empty(count, dtype=torch.int64), piece.grad.new_empty(count)
        places, values = self.select(piece, ctx)
        if piece.residual is not None:
            rest = piece.grad[places] - values
            if piece.residual.data_ptr() != piece.grad.data_ptr():
                piece.residual.copy_(piece.grad)
            piece.residual[places] = rest
        return places, values

    def _scales(self, chosen: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """One magnitude for each parameter, if its values differ only in sign."""
        if not self.signed:
            return chosen[0][1].new_empty(0, dtype=torch.float32)
        return torch.stack([v[:1].abs().sum().float() for _, v in chosen])

    def _payload(self, chosen: Sequence[tuple[Tensor, Tensor]], scratch: int) -> tuple[Tensor, ...]:
        places, values = (torch.cat([pair[i] for pair in chosen]) for i in (0, 1))
        pad = scratch - places.numel()
        if self.signed:
            return (torch.nn.functional.pad((places * 2 + torch.signbit(values)).int(), (0, pad)),)
        return torch.nn.functional.pad(values, (0, pad)), torch.nn.functional.pad(places.int(), (0, pad))

    def _places(self, payload: Sequence[Tensor]) -> Tensor:
        return payload[0] >> 1 if self.signed else payload[1]

    def _add(self, pieces: Sequence[Piece], lengths: Sequence[int], scales: Tensor, payload: Sequence[Tensor]) -> None:
        at = 0
        for number, (piece, length) in enumerate(zip(pieces, lengths, strict=True)):
            part = [tensor[at : at + length] for tensor in payload]
            at += length
            if self.signed:
                size = scales[number].to(piece.mean.dtype)
                piece.mean.index_add_(0, part[0] >> 1, torch.where((part[0] & 1).bool(), -size, size))
            else:
                piece.mean.index_add_(0, part[1], part[0])


def counted(pieces: Sequence[Piece], counts: Tensor) -> list[int]:
    """The number of values of each parameter that a payload announces; checked before memory is allocated."""
    found: list[int] = counts.tolist()
    for piece, count in zip(pieces, found, strict=True):
        if not 0 <= count <= piece.spec.numel:
            raise PayloadError(f"a payload announces {count} values of {piece.spec.name}, which has {piece.spec.numel}")
    return found


def check_places(pieces: Sequence[Piece], everyone: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> None:
    """Reject indices outside of their parameters, in all payloads at once, before any value is added.

    `counts`: the number of indices in each payload, by parameter; bytes after them are ignored.
    """
    if pieces[0].mean.is_meta:
        return
    places = torch.cat([each[: sum(lengths)] for each, lengths in zip(everyone, counts, strict=True)])
    sizes = torch.tensor([piece.spec.numel for piece in pieces] * len(everyone))
    ends = sizes.repeat_interleave(torch.tensor([length for lengths in counts for length in lengths]))
    outside = (places < 0) | (places >= ends.to(places.device))
    if outside.any():
        first = int(outside.nonzero()[0])
        raise PayloadError(f"a payload has index {int(places[first])} of a parameter with {int(ends[first])} values")
