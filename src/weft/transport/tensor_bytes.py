"""Tensors as the bytes that they occupy in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def raw(part: Tensor | memoryview) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; a memoryview is returned as it is."""
    if isinstance(part, memoryview):
        return part
    return memoryview(part.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
