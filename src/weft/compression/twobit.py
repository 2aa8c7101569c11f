from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft import kernels
from weft.compression._coded import Coded, numbers, put
from weft.lazy import torch
from weft.ops import Spec

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Twobit(Coded):
    """Sends values beyond a threshold as the threshold with their sign, in two bits [MXNet].

    d / 4 + 4 bytes for any values. Use inside error_feedback, as in MXNet, where small values accumulate until they
    pass the threshold.
    """

    threshold: float = 0.5
    """The threshold, which is also the magnitude that is sent."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf:
            raise ValueError(f"threshold is {self.threshold}, but must be a positive number")

    def error(self, x: Tensor, spec: Spec) -> float:
        return float(x.double().abs().clamp(min=self.threshold).norm())

    def size(self, count: int, width: int) -> int:
        return 4 + kernels.packed_size(count, 2)

    def encode(
        self, x: Tensor, code: Tensor, width: int, key: int, residual: Tensor | None, pending: bool = False
    ) -> None:
        scale, codes = numbers(code, 1)
        scale.fill_(self.threshold)
        ternary_encode(x, scale, codes, residual, pending, None)

    def decode(self, code: Tensor, out: Tensor, width: int, add: bool) -> None:
        scale, codes = numbers(code, 1)
        ternary_decode(codes, scale, out, add)


def ternary_encode(
    x: Tensor, scale: Tensor, codes: Tensor, residual: Tensor | None, pending: bool, key: int | None
) -> None:
    """Encode each value as -scale, 0 or scale. With a key: at random, so that values below the scale are unbiased."""
    fast = kernels.of(x)
    if fast:
        fast.ternary_encode(x, scale, codes, residual, pending, key)
        return
    size = x.float().abs()
    if key is None:
        sent = size >= scale
    else:
        inverse = 1 / scale
        odds = torch.minimum(size, scale) * torch.where(inverse <= 3.4e38, inverse, 0)
        sent = odds > kernels.uniform(x.numel(), key, x.device)
    levels = torch.where(torch.signbit(x), -1, 1) * sent
    codes.copy_(kernels.pack(levels + 1, 2))
    if residual is not None:
        torch.sub(x, levels.float() * scale, out=residual)


def ternary_decode(codes: Tensor, scale: Tensor, out: Tensor, add: bool) -> None:
    fast = kernels.of(out)
    if fast:
        fast.ternary_decode(codes, scale, out, add)
    else:
        put((kernels.unpack(codes, out.numel(), 2).float() - 1) * scale, out, add)
