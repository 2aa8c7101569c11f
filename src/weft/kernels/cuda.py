"""The functions of cpu.py for tensors on a GPU, in Triton: one read of the gradient, without synchronization.

Decoders give the same bits as plain PyTorch: multiply-adds are not fused, and divisions are correctly rounded. Only
`topk_encode` and `places_from` synchronize, to read a count for large parameters.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.cuda_places import places_from, topk_encode
from weft.kernels.cuda_thin import basis, thin_left, thin_product, thin_right

__all__ = ["basis", "places_from", "thin_left", "thin_product", "thin_right", "topk_encode"]

_TILE = 4096
_ROW = 16384
"""Values that a program can hold at once; longer rows are read twice."""
_A_WARP = 512
"""Values per warp, 16 in each thread."""


# --- common functions -------------------------------------------------------------------------------------------------


@triton.jit
def _uniform(i, key):
    """kernels.uniform: numbers in [0, 1) from a counter; the same factors, as signed integers."""
    x = (i * -1640531527 + key).to(tl.uint32, bitcast=True)
    x = ((x ^ (x >> 16)).to(tl.int32, bitcast=True) * -2048144789).to(tl.uint32, bitcast=True)
    x = ((x ^ (x >> 13)).to(tl.int32, bitcast=True) * -1028477387).to(tl.uint32, bitcast=True)
    return ((x ^ (x >> 16)) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _due(x, residual, at, inside, pending):
    v = tl.load(x + at, mask=inside, other=0.0)
    if pending:
        v += tl.load(residual + at, mask=inside, other=0.0)
    return v


@triton.jit
def _negative(v):
    return v.to(tl.int32, bitcast=True) < 0


@triton.jit
def _reciprocal(s):
    """1 / s, or 0 if that is not finite."""
    inverse = tl.div_rn(1.0, s)
    return tl.where(inverse <= 3.4e38, inverse, 0.0)


@triton.jit
def _store_packed(code, to, first, most, width: tl.constexpr, some: tl.constexpr):
    """Store codes [rows, groups, some] of `width` bits from `to`; `first`: each group's first byte; below `most`.

    A group fills whole 4-byte words, which are stored at once, or has 8 codes in `width` bytes. Four codes are in one
    thread and are combined there; only the combined codes move between threads.
    """
    k = tl.arange(0, some)[None, None, :] * width
    if width * some % 32 == 0:
        four = tl.reshape(code, [code.shape[0], code.shape[1], some // 4, 4]) << (tl.arange(0, 4) * width)
        quads = tl.sum(four, axis=3)
        k = tl.arange(0, some // 4)[None, None, :] * (4 * width)
        to4 = to.to(tl.pointer_type(tl.int32), bitcast=True)
        for w in tl.static_range(width * some // 32):
            up, down = tl.maximum(k - 32 * w, 0), tl.maximum(32 * w - k, 0)
            part = tl.where((k < 32 * w + 32) & (k + 4 * width > 32 * w), (quads << up) >> down, 0)
            word, at = tl.sum(part, axis=2), first + 4 * w
            tl.store(to4 + at // 4, word, mask=at + 4 <= most)
            for b in tl.static_range(3):  # the code ends within a word
                tl.store(to + at + b, (word >> (8 * b)).to(tl.uint8), mask=(at + 4 > most) & (at + b < most))
    elif width == 1:
        tl.store(to + first, tl.sum(code << k, axis=2).to(tl.uint8), mask=first < most)
    else:
        word, byte = tl.sum(code.to(tl.int64) << k, axis=2)[:, :, None], tl.arange(0, 8)[None, None, :]
        at = first[:, :, None] + byte
        tl.store(to + at, ((word >> (byte * 8)) & 255).to(tl.uint8), mask=(byte < width) & (at < most))


def _group(width: int, row: int) -> int:
    """The number of codes packed together: as many as fill whole 4-byte words if rows are divisible by it, else 8."""
    some = 32 // math.gcd(width, 32)
    return some if row % some == 0 else 8


@triton.jit
def _load_packed(codes, i, most, width: tl.constexpr):
    """Load the codes with indices i."""
    bit = (i % 8) * width
    at = i // 8 * width + bit // 8
    pair = tl.load(codes + at, mask=at < most, other=0).to(tl.int32)
    if 8 % width != 0:
        pair |= tl.load(codes + at + 1, mask=at + 1 < most, other=0).to(tl.int32) << 8
    return (pair >> (bit % 8).to(tl.int32)) & ((1 << width) - 1)


@triton.jit
def _put(out, at, value, inside, add: tl.constexpr):
    if add:
        value = tl.load(out + at, mask=inside, other=0.0) + value
    tl.store(out + at, value, mask=inside)


def _shape(width: int, most: int = _ROW) -> tuple[int, int, int]:
    """The tile for rows of this width: the number of rows, the values of each, and the number of warps."""
    tile = max(8, min(most, triton.next_power_of_2(width)))
    rows = max(1, _A_WARP // tile)
    return rows, tile, rows * tile // _A_WARP


def _signed(key: int | None) -> int:
    """A 32-bit key as the signed 32-bit integer that Triton takes."""
    key = key or 0
    return key - (1 << 32) if key >= 1 << 31 else key


_EXACT: dict[str, Any] = {"enable_fp_fusion": False}


# --- int8: a scale for each block -------------------------------------------------------------------------------------


@triton.jit
def _int8_codes(
    v, codes, residual, at, inside, scale, inverse, i, key, random: tl.constexpr, has_residual: tl.constexpr
):
    q = v * inverse
    q = tl.floor(q + _uniform(i, key)) if random else (q + 12582912.0) - 12582912.0  # to the nearest, ties to even
    q = tl.minimum(tl.maximum(q, -127.0), 127.0)
    tl.store(codes + at, q.to(tl.int8), mask=inside)
    if has_residual:
        tl.store(residual + at, v - q * scale, mask=inside)


@triton.jit(do_not_specialize=["key"])
def _int8_encode(
    x,
    codes,
    scales,
    residual,
    count,
    key,
    block: tl.constexpr,
    random: tl.constexpr,
    has_residual: tl.constexpr,
    pending: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, tile)[None, :]
    start = (row * block)[:, None]
    most = tl.zeros([rows], tl.float32)
    if tile >= block:
        inside = (column < block) & (start + column < count)
        v = _due(x, residual, start + column, inside, pending)
        most = tl.max(tl.abs(v), axis=1)
    else:
        for begin in range(0, block, tile):
            c = begin + column
            v = _due(x, residual, start + c, (c < block) & (start + c < count), pending)
            most = tl.maximum(most, tl.max(tl.abs(v), axis=1))
    scale = tl.div_rn(most, 127.0)
    inverse = _reciprocal(scale)
    scale = tl.where(inverse > 0, scale, 0.0)
    tl.store(scales + row, scale, mask=row * block < count)
    scale, inverse = scale[:, None], inverse[:, None]
    if tile >= block:
        at = start + column
        _int8_codes(v, codes, residual, at, inside, scale, inverse, at.to(tl.int32), key, random, has_residual)
    else:
        for begin in range(0, block, tile):
            at = start + begin + column
            inside = (begin + column < block) & (at < count)
            v = _due(x, residual, at, inside, pending)
            _int8_codes(v, codes, residual, at, inside, scale, inverse, at.to(tl.int32), key, random, has_residual)


def int8_encode(
    x: Tensor,
    block: int,
    codes: Tensor,
    scales: Tensor,
    residual: Tensor | None,
    pending: bool,
    key: int | None,
) -> None:
    rows, tile, warps = _shape(block)
    grid = (triton.cdiv(scales.numel(), rows),)
    flags = {"random": key is not None, "has_residual": residual is not None, "pending": pending}
    _int8_encode[grid](
        x,
        codes,
        scales,
        residual,
        x.numel(),
        _signed(key),
        block,
        **flags,
        rows=rows,
        tile=tile,
        num_warps=warps,
        **_EXACT,
    )


@triton.jit
def _int8_decode(codes, scales, out, count, block: tl.constexpr, add: tl.constexpr, tile: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = at < count
    scale = tl.load(scales + at // block, mask=inside, other=0.0)
    _put(out, at, tl.load(codes + at, mask=inside, other=0).to(tl.float32) * scale, inside, add)


def int8_decode(codes: Tensor, scales: Tensor, block: int, out: Tensor, add: bool) -> None:
    _int8_decode[(triton.cdiv(out.numel(), _TILE),)](codes, scales, out, out.numel(), block, add, _TILE, **_EXACT)


# --- one bit ----------------------------------------------------------------------------------------------------------


@triton.jit
def _sign_encode(x, bits, sizes, residual, count, pending: tl.constexpr, groups: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)[None, :]
    at = first[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    inside = at < count
    v = _due(x, residual, at, inside, pending)
    if pending:
        tl.store(residual + at, v, mask=inside)
    _store_packed((_negative(v) & inside).to(tl.int32), bits, first, (count + 7) // 8, 1, 8)
    tl.store(sizes + tl.program_id(0), tl.sum(tl.sum(tl.sum(tl.abs(v), axis=2), axis=1), axis=0))


@triton.jit
def _sign_rest(x, scale, residual, count, tile: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    v, s = tl.load(x + at, mask=at < count, other=0.0), tl.load(scale)
    tl.store(residual + at, v - tl.where(_negative(v), -s, s), mask=at < count)


def sign_encode(x: Tensor, bits: Tensor, scale: Tensor, scaled: bool, residual: Tensor | None, pending: bool) -> None:
    tiles = (triton.cdiv(x.numel(), _TILE),)
    sizes = x.new_empty(tiles)
    _sign_encode[tiles](x, bits, sizes, residual, x.numel(), pending, _TILE // 8)
    total = sizes.sum(dtype=torch.float64)
    scale.copy_(total / x.numel() if scaled else total > 0)
    if residual is not None:
        _sign_rest[tiles](residual if pending else x, scale, residual, x.numel(), _TILE, **_EXACT)


@triton.jit
def _onebit_tile(x, bits, residual, row, here, width, begin, pending: tl.constexpr, tile: tl.constexpr):
    """A part of each row: stores its sign bits and returns its values and partial sums."""
    group = tl.arange(0, tile // 8)[None, :]
    column = begin + group[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    inside = (column < width) & here[:, None, None]
    v = _due(x, residual, (row * width)[:, None, None] + column, inside, pending)
    negative = _negative(v) & inside
    stride = (width + 7) // 8
    byte = begin // 8 + group
    to = row[:, None] * stride + byte
    _store_packed(negative.to(tl.int32), bits, to, tl.where((byte < stride) & here[:, None], to + 1, 0), 1, 8)
    below = tl.sum(tl.sum(tl.where(negative, v, 0.0), axis=2), axis=1)
    above = tl.sum(tl.sum(tl.where(negative, 0.0, v), axis=2), axis=1)
    return v, below, above, tl.sum(tl.sum(negative.to(tl.int32), axis=2), axis=1)


@triton.jit
def _onebit_rest(v, residual, row, here, width, begin, up, down, tile: tl.constexpr):
    column = begin + tl.arange(0, tile // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    rest = v - tl.where(_negative(v), down[:, None, None], up[:, None, None])
    tl.store(residual + (row * width)[:, None, None] + column, rest, mask=(column < width) & here[:, None, None])


@triton.jit
def _onebit_encode(
    x,
    bits,
    values,
    residual,
    count,
    width,
    has_residual: tl.constexpr,
    pending: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
    whole: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    here = row < count
    v, below, above, negatives = _onebit_tile(x, bits, residual, row, here, width, 0, pending, tile)
    if not whole:
        for begin in range(tile, width, tile):
            _, less, more, some = _onebit_tile(x, bits, residual, row, here, width, begin, pending, tile)
            below += less
            above += more
            negatives += some
    up = tl.div_rn(above, tl.maximum(width - negatives, 1).to(tl.float32))
    down = tl.div_rn(below, tl.maximum(negatives, 1).to(tl.float32))
    tl.store(values + 2 * row, up, mask=here)
    tl.store(values + 2 * row + 1, down, mask=here)
    if has_residual:
        _onebit_rest(v, residual, row, here, width, 0, up, down, tile)
        if not whole:
            column = tl.arange(0, tile // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
            for begin in range(tile, width, tile):
                inside = (begin + column < width) & here[:, None, None]
                more = _due(x, residual, (row * width)[:, None, None] + begin + column, inside, pending)
                _onebit_rest(more, residual, row, here, width, begin, up, down, tile)


def onebit_encode(x: Tensor, width: int, bits: Tensor, values: Tensor, residual: Tensor | None, pending: bool) -> None:
    count = x.numel() // width
    rows, tile, warps = _shape(width, _ROW if residual is not None else _TILE)
    flags = {
        "has_residual": residual is not None,
        "pending": pending,
        "rows": rows,
        "tile": tile,
        "whole": width <= tile,
    }
    grid = (triton.cdiv(count, rows),)
    _onebit_encode[grid](x, bits, values, residual, count, width, **flags, num_warps=warps, **_EXACT)


@triton.jit
def _onebit_decode(bits, values, out, width, add: tl.constexpr, tile: tl.constexpr):
    across = tl.cdiv(width, tile)
    row = (tl.program_id(0) // across).to(tl.int64)
    column = tl.program_id(0) % across * tile + tl.arange(0, tile)
    inside = column < width
    byte = tl.load(bits + row * ((width + 7) // 8) + column // 8, mask=inside, other=0).to(tl.int32)
    up, down = tl.load(values + 2 * row), tl.load(values + 2 * row + 1)
    _put(out, row * width + column, tl.where((byte >> (column % 8)) & 1 != 0, down, up), inside, add)


def onebit_decode(bits: Tensor, values: Tensor, width: int, out: Tensor, add: bool) -> None:
    tile = min(_TILE, triton.next_power_of_2(width))
    grid = (out.numel() // width * triton.cdiv(width, tile),)
    _onebit_decode[grid](bits, values, out, width, add, tile, **_EXACT)


# --- a few levels, packed ---------------------------------------------------------------------------------------------


@triton.jit
def _shrink(most):
    """A scale that keeps squares in range."""
    inverse = tl.div_rn(1.0, most)
    return tl.where((most > 1e15) | (most < 1e-15), tl.where(inverse <= 3.4e38, inverse, 0.0), 1.0)


@triton.jit
def _qsgd_codes(
    v,
    codes,
    residual,
    at,
    inside,
    group,
    factor,
    unit,
    most,
    key,
    levels: tl.constexpr,
    width: tl.constexpr,
    some: tl.constexpr,
    has_residual: tl.constexpr,
):
    level = tl.minimum(tl.floor(tl.abs(v) * factor + _uniform(at, key)), levels)
    level = tl.where(_negative(v), -level, level)
    _store_packed(
        tl.where(inside, level.to(tl.int32) + levels, 0), codes, group * (width * some // 8), most, width, some
    )
    if has_residual:
        tl.store(residual + at, v - level * unit, mask=inside)


@triton.jit(do_not_specialize=["key"])
def _qsgd_encode(
    x,
    codes,
    norms,
    residual,
    count,
    key,
    bucket: tl.constexpr,
    levels: tl.constexpr,
    width: tl.constexpr,
    largest: tl.constexpr,
    some: tl.constexpr,
    has_residual: tl.constexpr,
    pending: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * rows  # offsets below count from this program's first bucket
    x += first * bucket
    codes += first * (bucket * width // 8)
    norms += first
    if has_residual:
        residual += first * bucket
    key += (first * bucket).to(tl.int32) * -1640531527
    count = tl.minimum(count - first * bucket, rows * bucket).to(tl.int32)
    row = tl.arange(0, rows)
    group = tl.arange(0, tile // some)[None, :]
    column = group[:, :, None] * some + tl.arange(0, some)[None, None, :]
    start = (row * bucket)[:, None, None]
    most = tl.zeros([rows], tl.float32)
    squares = tl.zeros([rows], tl.float32)
    if tile >= bucket:
        at = start + column
        inside = (column < bucket) & (at < count)
        v = _due(x, residual, at, inside, pending)
        most = tl.max(tl.max(tl.abs(v), axis=2), axis=1)
        shrink = _shrink(most)
        small = v * shrink[:, None, None]
        squares = tl.sum(tl.sum(small * small, axis=2), axis=1)
    else:
        for begin in range(0, bucket, tile):
            at = start + begin + column
            v = _due(x, residual, at, (begin + column < bucket) & (at < count), pending)
            most = tl.maximum(most, tl.max(tl.max(tl.abs(v), axis=2), axis=1))
        shrink = _shrink(most)
        for begin in range(0, bucket, tile):
            at = start + begin + column
            v = _due(x, residual, at, (begin + column < bucket) & (at < count), pending) * shrink[:, None, None]
            squares += tl.sum(tl.sum(v * v, axis=2), axis=1)
    norm = tl.where(shrink > 0, tl.minimum(tl.div_rn(tl.sqrt_rn(squares), shrink), 3.4028234e38), 0.0)
    if largest:
        norm = most
    factor = tl.div_rn(levels * 1.0, norm)
    factor = tl.where((norm > 0) & (factor <= 3.4e38), factor, 0.0)
    norm = tl.where(factor > 0, norm, 0.0)
    tl.store(norms + row, norm, mask=row * bucket < count)
    factor, unit = factor[:, None, None], tl.div_rn(norm, levels * 1.0)[:, None, None]
    last = (count * width + 7) // 8
    pack = (row * (bucket // some))[:, None] + group
    if tile >= bucket:
        pack = tl.where(group * some < bucket, pack, last)
        _qsgd_codes(v, codes, residual, at, inside, pack, factor, unit, last, key, levels, width, some, has_residual)
    else:
        for begin in range(0, bucket, tile):
            at = start + begin + column
            inside = (begin + column < bucket) & (at < count)
            v = _due(x, residual, at, inside, pending)
            here = tl.where(begin + group * some < bucket, pack + begin // some, last)
            _qsgd_codes(
                v, codes, residual, at, inside, here, factor, unit, last, key, levels, width, some, has_residual
            )


def qsgd_encode(
    x: Tensor,
    bucket: int,
    levels: int,
    width: int,
    largest: bool,
    codes: Tensor,
    norms: Tensor,
    residual: Tensor | None,
    pending: bool,
    key: int,
) -> None:
    rows, tile, warps = _shape(bucket)
    some = _group(width, bucket)
    flags = {"has_residual": residual is not None, "pending": pending, "rows": rows, "tile": tile, "num_warps": warps}
    grid = (triton.cdiv(norms.numel(), rows),)
    _qsgd_encode[grid](
        x, codes, norms, residual, x.numel(), _signed(key), bucket, levels, width, largest, some, **flags, **_EXACT
    )


@triton.jit
def _qsgd_decode(
    codes,
    norms,
    out,
    count,
    bucket: tl.constexpr,
    levels: tl.constexpr,
    width: tl.constexpr,
    add: tl.constexpr,
    tile: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = at < count
    unit = tl.div_rn(tl.load(norms + at // bucket, mask=inside, other=0.0), levels * 1.0)
    level = _load_packed(codes, at, (count * width + 7) // 8, width) - levels
    _put(out, at, level.to(tl.float32) * unit, inside, add)


def qsgd_decode(codes: Tensor, norms: Tensor, bucket: int, levels: int, width: int, out: Tensor, add: bool) -> None:
    grid = (triton.cdiv(out.numel(), _TILE),)
    _qsgd_decode[grid](codes, norms, out, out.numel(), bucket, levels, width, add, _TILE, **_EXACT)


@triton.jit(do_not_specialize=["key"])
def _ternary_encode(
    x,
    scale,
    codes,
    residual,
    count,
    key,
    random: tl.constexpr,
    has_residual: tl.constexpr,
    pending: tl.constexpr,
    groups: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * groups + tl.arange(0, groups)[None, :]
    at = group[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    inside = at < count
    v, s = _due(x, residual, at, inside, pending), tl.load(scale)
    if random:
        sent = tl.minimum(tl.abs(v), s) * _reciprocal(s) > _uniform(at.to(tl.int32), key)
    else:
        sent = tl.abs(v) >= s
    level = tl.where(sent, tl.where(_negative(v), -1, 1), 0)
    _store_packed(tl.where(inside, level + 1, 0), codes, group * 4, (count * 2 + 7) // 8, 2, 16)
    if has_residual:
        tl.store(residual + at, v - level.to(tl.float32) * s, mask=inside)


def ternary_encode(
    x: Tensor, scale: Tensor, codes: Tensor, residual: Tensor | None, pending: bool, key: int | None
) -> None:
    flags = {"random": key is not None, "has_residual": residual is not None, "pending": pending, "groups": _TILE // 16}
    _ternary_encode[(triton.cdiv(x.numel(), _TILE),)](
        x, scale, codes, residual, x.numel(), _signed(key), **flags, **_EXACT
    )


@triton.jit
def _ternary_decode(codes, scale, out, count, add: tl.constexpr, tile: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    level = _load_packed(codes, at, (count * 2 + 7) // 8, 2) - 1
    _put(out, at, level.to(tl.float32) * tl.load(scale), at < count, add)


def ternary_decode(codes: Tensor, scale: Tensor, out: Tensor, add: bool) -> None:
    _ternary_decode[(triton.cdiv(out.numel(), _TILE),)](codes, scale, out, out.numel(), add, _TILE, **_EXACT)


@triton.jit
def _moments(x, found, count, tile: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    v = tl.load(x + at, mask=at < count, other=0.0).to(tl.float64)
    to = found + 3 * tl.program_id(0)
    tl.store(to, tl.max(tl.abs(v), axis=0))
    tl.store(to + 1, tl.sum(v, axis=0))
    tl.store(to + 2, tl.sum(v * v, axis=0))


def moments(x: Tensor) -> Tensor:
    """The largest absolute value, the sum, and the sum of squares, in float64."""
    tiles = triton.cdiv(x.numel(), _TILE)
    found = torch.empty(tiles, 3, dtype=torch.float64, device=x.device)
    _moments[(tiles,)](x, found, x.numel(), _TILE)
    return torch.cat([found[:, :1].amax(0), found[:, 1:].sum(0)])


# --- narrower floats --------------------------------------------------------------------------------------------------


def bf16_encode(x: Tensor, out: Tensor, residual: Tensor | None) -> None:
    out.copy_(x)
    if residual is not None:
        torch.sub(x, out, out=residual)


def sparse_add(places: Tensor, values: Tensor, out: Tensor) -> None:
    out.index_add_(0, places, values)
