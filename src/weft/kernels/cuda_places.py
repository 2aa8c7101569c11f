"""The largest values of a tensor on a GPU, and their indices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
_FEW = 1 << 17
"""Size up to which PyTorch's own selection is fast enough."""
_SAMPLE = 1 << 16


@triton.jit
def _count(x, least, counts, count, tile: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    size = tl.abs(tl.load(x + at, mask=at < count, other=0.0))
    passed = (size >= tl.load(least)) & (at < count)
    tl.store(counts + tl.program_id(0), tl.sum(passed.to(tl.int32), axis=0))


@triton.jit
def _collect(x, least, ends, counts, places, capacity, count, tile: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    size = tl.abs(tl.load(x + at, mask=at < count, other=0.0))
    passed = (size >= tl.load(least)) & (at < count)
    before = tl.load(ends + tl.program_id(0)) - tl.load(counts + tl.program_id(0))
    to = before + tl.cumsum(passed.to(tl.int32), axis=0) - 1
    tl.store(places + to, at.to(tl.int32), mask=passed & (to < capacity))


def places_from(x: Tensor, least: Tensor, places: Tensor) -> int:
    """Write the first indices of values with magnitude `least` or more, as many as fit; returns how many."""
    return min(places.numel(), _places_from(x, least, places))


def _places_from(x: Tensor, least: Tensor, places: Tensor) -> int:
    tiles = (triton.cdiv(x.numel(), _TILE),)
    counts = torch.empty(tiles, dtype=torch.int32, device=x.device)
    _count[tiles](x, least, counts, x.numel(), _TILE)
    ends = counts.cumsum(0)
    _collect[tiles](x, least, ends, counts, places, places.numel(), x.numel(), _TILE)
    return int(ends[-1])


def topk_encode(x: Tensor, candidates: Tensor, places: Tensor, values: Tensor) -> int:
    """The indices and values of the largest values, as many as fit; `candidates` is scratch memory.

    For a large parameter a sample gives a threshold for candidates; if it selects too few or too many, all are ranked.
    """
    k = values.numel()
    among = None
    if x.numel() > _FEW and k < x.numel() // 4:
        sample = x[:: x.numel() // _SAMPLE].abs()
        share = k / x.numel()
        few = int(sample.numel() * (1.15 * share + 3 * (share / sample.numel()) ** 0.5))
        found = _places_from(x, sample.topk(few, sorted=False).values.amin(), candidates)
        among = candidates[:found] if k <= found <= candidates.numel() else None
    if among is None:
        places.copy_(x.abs().topk(k, sorted=False).indices)
    else:
        torch.index_select(among, 0, x[among].abs().topk(k, sorted=False).indices, out=places)
    torch.index_select(x, 0, places, out=values)
    return k
