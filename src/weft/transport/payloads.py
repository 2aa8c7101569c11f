"""Payloads as bytes, and collectives in several parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops import All, Collective, Payload, Sum, nbytes


def pack(payload: Payload) -> Tensor:
    """One uint8 tensor with the bytes of all tensors of a payload, in order."""
    parts = [part.contiguous().view(-1).view(torch.uint8) for part in payload]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(row: Tensor, like: Payload) -> Payload:
    """The inverse of `pack`, with the shapes and dtypes of `like`.

    Tensors are views of `row`, except where the alignment of a dtype requires a copy.
    """
    parts = []
    at = 0
    for part in like:
        size = nbytes((part,))
        chunk = row[at : at + size]
        if chunk.storage_offset() % part.element_size():
            chunk = chunk.clone()
        parts.append(chunk.view(part.dtype).view(part.shape))
        at += size
    return tuple(parts)


def cut(ops: Sequence[Collective], part: int, parts: int) -> list[Collective]:
    """Part `part` of a collective in `parts` parts, for each carried worker. A `Scatter` cannot be cut."""
    if parts == 1:
        return list(ops)
    pieces: list[Collective] = []
    for op in ops:
        if isinstance(op, Sum):
            pieces.append(Sum(op.payload.view(-1).tensor_split(parts)[part]))
        else:
            assert isinstance(op, All), "a Scatter cannot be cut"
            pieces.append(All((pack(op.payload).tensor_split(parts)[part],)))
    return pieces


def joined(ops: Sequence[Collective], results: Sequence[list[Any]]) -> list[Any]:
    """The result of a collective from the results of its parts; one for each carried worker."""
    if len(results) == 1:
        return results[0]
    whole: list[Any] = []
    for worker, op in enumerate(ops):
        if isinstance(op, Sum):
            whole.append(op.payload)  # the parts are views of it and were summed in place
            continue
        assert isinstance(op, All)
        rows = zip(*(part[worker] for part in results), strict=True)
        whole.append([unpack(torch.cat([piece for (piece,) in row]), op.payload) for row in rows])
    return whole
