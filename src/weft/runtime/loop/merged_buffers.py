"""Buffers of a model whose copies are merged: the mean over workers, weighted as the merge; integers are worker 0's.

Only buffers that have changed on any worker since the last merge are exchanged, in float64 and in the order of ranks:
the result does not depend on the number of processes, and values that are equal everywhere stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.transport.collective import Processes


def merged_buffers(
    transport: Processes, before: Sequence[Tensor], copies: Sequence[Sequence[Tensor]], shares: Sequence[float]
) -> list[Tensor]:
    """The merged buffers. `before` are those of the last merge, `copies` those of this process's workers."""
    if not before:
        return []
    changed = [any(not _same(own[i], old) for own in copies) for i, old in enumerate(before)]
    rows = transport.tell([int(each) for each in changed])
    indices = [i for i in range(len(before)) if any(row[i] for row in rows)]
    result = list(before)
    if not indices:
        return result
    layout = transport.layout
    carried = [len(layout.carried(process)) for process in range(layout.processes)]
    packed = [_packed([own[i] for i in indices], share) for own, share in zip(copies, shares, strict=True)]
    packed += [torch.zeros_like(packed[0])] * (max(carried) - len(packed))
    heard = transport.tell_tensor(torch.cat(packed))
    workers = [row for rows, count in zip(heard, carried, strict=True) for row in rows.view(max(carried), -1)[:count]]
    weights = torch.stack([row[:1].view(torch.float64) for row in workers])
    sizes = [before[i].numel() * (2 if before[i].is_complex() else 1) for i in indices]
    parts = [row[1:].split(sizes) for row in workers]
    for place, i in enumerate(indices):
        result[i] = _mean(before[i], [part[place] for part in parts], weights)
    return result


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other)


def _packed(buffers: Sequence[Tensor], share: float) -> Tensor:
    """A worker's share and its buffers as 64-bit integers: floats by their bits in float64."""
    words = [torch.tensor([share], dtype=torch.float64).view(torch.int64)]
    for buffer in buffers:
        flat = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        flat = flat.detach().cpu().reshape(-1)
        words.append(flat.double().view(torch.int64) if flat.is_floating_point() else flat.to(torch.int64))
    return torch.cat(words)


def _mean(like: Tensor, rows: Sequence[Tensor], weights: Tensor) -> Tensor:
    """The first worker's values plus the weighted differences of all: exact where they are equal."""
    if not (like.is_floating_point() or like.is_complex()):
        return rows[0].view(like.shape).to(like)
    first = rows[0].view(torch.float64)
    total = torch.zeros_like(first)
    for row, weight in zip(rows, weights, strict=True):
        other = row.view(torch.float64)
        total += weight * torch.where(other == first, 0.0, other - first)
    mean = first + total
    if like.is_complex():
        return torch.view_as_complex(mean.view(*like.shape, 2)).to(like)
    return mean.view(like.shape).to(like)
