"""Zeros where a flag on the GPU says so, without reading what is there: next to nothing while the flag is down."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192


@triton.jit  # type: ignore[untyped-decorator]
def _zero_if(flag, flat, count, block: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads annotations
    if tl.load(flag) != 0:
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        tl.store(flat + at, tl.zeros([block], flat.dtype.element_ty), mask=at < count)


def zero_if(flag: Tensor, flat: Tensor) -> None:
    """`flag`: one byte; `flat`: contiguous memory."""
    _zero_if[(triton.cdiv(flat.numel(), _BLOCK),)](flag, flat, flat.numel(), block=_BLOCK)
