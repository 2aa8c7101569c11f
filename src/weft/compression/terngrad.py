from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft import kernels
from weft.compression._coded import Coded, numbers
from weft.compression.twobit import ternary_decode, ternary_encode
from weft.lazy import torch
from weft.ops import Spec

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Terngrad(Coded):
    """Rounds each value at random to -s, 0 or s, in two bits, without bias [Wen et al. 2017].

    s = max|x| of the layer, after values are clipped to `clip` standard deviations; the probability of s is |x| / s.
    d / 4 + 4 bytes. Clipping is the only bias; clip=inf has none.
    """

    clip: float = 2.5
    """Standard deviations to which values are clipped; inf: no clipping."""

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"clip is {self.clip}, but must be positive")

    @property
    def unbiased(self) -> bool:
        return self.clip == math.inf

    def error(self, x: Tensor, spec: Spec) -> float:
        return math.sqrt(x.numel()) * float(x.abs().max())

    def size(self, count: int, width: int) -> int:
        return 4 + kernels.packed_size(count, 2)

    def encode(
        self, x: Tensor, code: Tensor, width: int, key: int, residual: Tensor | None, pending: bool = False
    ) -> None:
        scale, codes = numbers(code, 1)
        if residual is not None and pending:
            x = residual.add_(x)
        scale.copy_(self._scale(x))
        ternary_encode(x, scale, codes, residual, False, key)

    def _scale(self, x: Tensor) -> Tensor:
        fast = kernels.of(x)
        wide = x.double() if fast is None else x
        most: Tensor
        most, total, squares = fast.moments(x) if fast else (wide.abs().max(), wide.sum(), wide.square().sum())
        if not math.isfinite(self.clip):
            return most
        deviation = (squares / x.numel() - (total / x.numel()).square()).clamp(min=0).sqrt()
        usable = (deviation > 0) & deviation.isfinite()
        return torch.where(usable, torch.minimum(most, self.clip * deviation), most)

    def decode(self, code: Tensor, out: Tensor, width: int, add: bool) -> None:
        scale, codes = numbers(code, 1)
        ternary_decode(codes, scale, out, add)
