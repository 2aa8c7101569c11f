"""Products with thin matrices on a GPU, for PowerSGD: each reads its large matrix once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _thin_right(
    m,
    q,
    p,
    residual,
    height,
    width,
    rank: tl.constexpr,
    ranks: tl.constexpr,
    pending: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None, None]
    k = tl.arange(0, ranks)[None, :, None]
    total = tl.zeros([rows, ranks, tile], tl.float32)
    for begin in range(0, width, tile):
        column = begin + tl.arange(0, tile)[None, None, :]
        at, inside = row * width + column, (row < height) & (column < width)
        v = tl.load(m + at, mask=inside, other=0.0)
        if pending:
            v += tl.load(residual + at, mask=inside, other=0.0)
            tl.store(residual + at, v, mask=inside)
        total += v * tl.load(q + k * width + column, mask=(k < rank) & (column < width), other=0.0)
    to = row * rank + k
    tl.store(p + to, tl.sum(total, axis=2, keep_dims=True), mask=(row < height) & (k < rank))


def thin_right(m: Tensor, q: Tensor, p: Tensor, residual: Tensor | None) -> None:
    """p = m q'; with `residual`: p = (residual + m) q', and residual + m is stored in `residual`."""
    (height, width), rank = m.shape, q.shape[0]
    ranks = triton.next_power_of_2(rank)
    rows = max(1, 16 // ranks)
    grid = (triton.cdiv(height, rows),)
    _thin_right[grid](m, q, p, residual, height, width, rank, ranks, residual is not None, rows, 1024, num_warps=8)


@triton.jit
def _thin_left(
    m,
    p,
    parts,
    height,
    width,
    slab,
    rank: tl.constexpr,
    ranks: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
):
    column = tl.program_id(0) * tile + tl.arange(0, tile)[None, None, :]
    k = tl.arange(0, ranks)[None, :, None]
    total = tl.zeros([rows, ranks, tile], tl.float32)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64) * slab  # from the last rows, which are cached
    for begin in range(0, slab, rows):
        row = first + begin + tl.arange(0, rows)[:, None, None]
        v = tl.load(m + row * width + column, mask=(row < height) & (column < width), other=0.0)
        total += v * tl.load(p + row * rank + k, mask=(row < height) & (k < rank), other=0.0)
    to = (tl.program_id(1) * rank + k) * width + column
    tl.store(parts + to, tl.sum(total, axis=0, keep_dims=True), mask=(k < rank) & (column < width))


def thin_left(m: Tensor, p: Tensor, q: Tensor) -> None:
    """q = p' m."""
    (height, width), rank = m.shape, p.shape[1]
    ranks = triton.next_power_of_2(rank)
    rows, slab, tile = max(1, 16 // ranks), 512, 1024
    grid = (triton.cdiv(width, tile), triton.cdiv(height, slab))
    parts = m.new_empty(grid[1], rank, width)
    _thin_left[grid](m, p, parts, height, width, slab, rank, ranks, rows, tile, num_warps=8)
    torch.sum(parts, 0, out=q)


@triton.jit
def _thin_product(
    p,
    q,
    m,
    out,
    height,
    width,
    rank: tl.constexpr,
    rest: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
):
    across = tl.cdiv(width, tile)
    row = (tl.program_id(0) // across).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    column = tl.program_id(0) % across * tile + tl.arange(0, tile)[None, :]
    inside = (row < height) & (column < width)
    total = tl.zeros([rows, tile], tl.float32)
    for k in tl.static_range(rank):
        left = tl.load(p + row * rank + k, mask=row < height, other=0.0)
        term = left * tl.load(q + k * width + column, mask=column < width, other=0.0)
        if k == 0:
            total = term
        else:
            total += term
    if rest:
        total = tl.load(m + row * width + column, mask=inside, other=0.0) - total
    tl.store(out + row * width + column, total, mask=inside)


def thin_product(p: Tensor, q: Tensor, out: Tensor, taken_from: Tensor | None = None) -> None:
    """out = p q, or `taken_from` - p q."""
    (height, width), rank = out.shape, p.shape[1]
    rows, tile, rest = 4, 1024, taken_from is not None
    grid = (triton.cdiv(height, rows) * triton.cdiv(width, tile),)
    flags = {"num_warps": 8, "enable_fp_fusion": False}
    _thin_product[grid](p, q, taken_from, out, height, width, rank, rest, rows, tile, **flags)


@triton.jit
def _basis(gram, out, rank, ranks: tl.constexpr):
    """powersgd.basis, for one small matrix."""
    i, j = tl.arange(0, ranks)[:, None], tl.arange(0, ranks)[None, :]
    g = tl.load(gram + i * rank + j, mask=(i < rank) & (j < rank), other=0.0)
    found = tl.zeros([ranks, ranks], tl.float64)
    for k in range(rank):
        column = tl.where(i == k, 1.0, 0.0).to(tl.float64)
        for _ in tl.static_range(2):
            inner = tl.sum(tl.trans(found) * tl.trans(tl.sum(g * tl.trans(column), axis=1, keep_dims=True)), axis=1)
            column -= tl.sum(found * inner[None, :], axis=1, keep_dims=True)
        image = tl.sum(g * tl.trans(column), axis=1, keep_dims=True)
        left = tl.sum(tl.sum(column * image, axis=1), axis=0)
        size = tl.sum(tl.sum(tl.where((i == k) & (j == k), g, 0.0), axis=1), axis=0)
        scale = tl.where(left > 1e-12 * size, 1.0 / tl.sqrt(left), 0.0)
        found += tl.where(j == k, column * scale, 0.0)
    tl.store(out + i * rank + j, found, mask=(i < rank) & (j < rank))


def basis(gram: Tensor) -> Tensor:
    out = torch.empty_like(gram)
    _basis[(1,)](gram, out, len(gram), triton.next_power_of_2(len(gram)), num_warps=1)
    return out
