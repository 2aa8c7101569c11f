"""Kernels: the operations of compressors at the speed of memory.

`of(tensor)` returns the kernels for a tensor's device and dtype, or None. Compressors then use plain PyTorch, which
always works and is the reference for testing. `WEFT_KERNELS=plain` turns kernels off.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING

from weft.environment import UserSettings
from weft.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def of(tensor: Tensor) -> ModuleType | None:
    """The kernels for this tensor; they take contiguous float32."""
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        return None
    return _on(tensor.device.type)


@functools.cache
def _on(device: str) -> ModuleType | None:
    if UserSettings.from_env().kernels == "plain" or device not in ("cpu", "cuda"):
        return None
    if device == "cuda":
        return importlib.import_module("weft.kernels.cuda") if importlib.util.find_spec("triton") else None
    from weft.kernels import cpu

    return cpu if cpu.library() is not None else None


def uniform(count: int, key: int, device: torch.device, start: int = 0) -> Tensor:
    """Numbers in [0, 1) from a counter and a 32-bit key: the same on every device and in every kernel."""
    x = (torch.arange(start, start + count, device=device) * 0x9E3779B9 + key) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) >> 8).float() * 2.0**-24


def pack(codes: Tensor, width: int) -> Tensor:
    """Pack codes of `width` bits, eight into `width` bytes; the last group takes as many bytes as it needs."""
    count = codes.numel()
    eights = torch.nn.functional.pad(codes.to(torch.int64), (0, -count % 8)).view(-1, 8)
    words = (eights << (width * torch.arange(8, device=codes.device))).sum(1)
    return words.view(torch.uint8).view(-1, 8)[:, :width].reshape(-1)[: packed_size(count, width)]


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """The inverse of `pack`."""
    groups = -(-count // 8)
    eights = torch.nn.functional.pad(packed, (0, groups * width - packed.numel())).view(groups, width)
    words = torch.nn.functional.pad(eights, (0, 8 - width)).contiguous().view(torch.int64).view(-1)
    codes = words[:, None] >> (width * torch.arange(8, device=packed.device)) & ((1 << width) - 1)
    return codes.view(-1)[:count].to(torch.uint8)


def packed_size(count: int, width: int) -> int:
    return (count * width + 7) // 8
