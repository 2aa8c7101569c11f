"""Reads of a tensor that do not look at its values."""

from __future__ import annotations

from torch import Tensor

_ATTRIBUTES = [
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_leaf",
    "is_cuda",
    "is_sparse",
    "grad_fn",
]
METADATA_READS = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES} | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.is_floating_point,
    Tensor.is_complex,
}
"""As `__torch_function__` gets them."""
