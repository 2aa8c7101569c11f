from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from weft import kernels
from weft.compression._coded import Coded, numbers, put
from weft.lazy import torch
from weft.ops import Spec

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Qsgd(Coded):
    """Rounds each value at random to one of s levels of its bucket's norm, without bias [Alistarh et al. 2017].

    sign(x) |x|_2 l / s with l = floor(s |x| / |x|_2 + u), u uniform in [0, 1). ceil(log2(2 s + 1)) bits per value,
    packed, and 4 bytes per bucket. The paper's Elias code, which is shorter if most levels are 0, is not used. With
    norm=max, as in the paper's experiments, levels are closer together and errors are smaller.
    """

    levels: int = 16
    """s: the number of levels between zero and the norm."""
    bucket: int = 512
    """Values that share one norm."""
    norm: Literal["l2", "max"] = "l2"
    """The scale of the levels: a bucket's Euclidean norm, or its largest absolute value."""

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 127:
            raise ValueError(f"levels is {self.levels}, but must lie in 1 to 127")
        if self.bucket < 8 or self.bucket % 8:
            raise ValueError(f"bucket is {self.bucket}, but must be a multiple of 8")

    @property
    def width(self) -> int:
        """Bits per value."""
        return (2 * self.levels).bit_length()

    @property
    def unbiased(self) -> bool:
        return True

    def error(self, x: Tensor, spec: Spec) -> float:
        buckets = torch.nn.functional.pad(x.double(), (0, -x.numel() % self.bucket)).view(-1, self.bucket)
        norms = _norms(buckets, self.norm)
        return float(norms.norm()) * math.sqrt(self.bucket) / self.levels * (1 + 1e-4) + math.sqrt(x.numel()) * 1e-35

    def size(self, count: int, width: int) -> int:
        return 4 * -(-count // self.bucket) + kernels.packed_size(count, self.width)

    def grain(self, width: int) -> int:
        return self.bucket

    def encode(
        self, x: Tensor, code: Tensor, width: int, key: int, residual: Tensor | None, pending: bool = False
    ) -> None:
        norms, codes = numbers(code, -(-x.numel() // self.bucket))
        fast = kernels.of(x)
        if fast:
            fast.qsgd_encode(
                x,
                self.bucket,
                self.levels,
                self.width,
                self.norm == "max",
                codes,
                norms,
                residual,
                pending,
                key,
            )
            return
        values = x.float()
        buckets = torch.nn.functional.pad(values, (0, -x.numel() % self.bucket)).view(-1, self.bucket)
        norm = _norms(buckets.double(), self.norm).clamp(max=3.4028234e38).float()
        factor = self.levels / norm
        fine = (norm > 0) & (factor <= 3.4e38)
        norms.copy_(torch.where(fine, norm, 0))
        scaled = buckets.abs() * torch.where(fine, factor, 0)[:, None]
        level = (
            (scaled + kernels.uniform(buckets.numel(), key, x.device).view_as(buckets)).floor().clamp(max=self.levels)
        )
        level = torch.where(torch.signbit(buckets), -level, level).view(-1)[: x.numel()].to(torch.int64)
        codes.copy_(kernels.pack(level + self.levels, self.width))
        if residual is not None:
            torch.sub(x, self._opened(level, norms), out=residual)

    def decode(self, code: Tensor, out: Tensor, width: int, add: bool) -> None:
        norms, codes = numbers(code, -(-out.numel() // self.bucket))
        fast = kernels.of(out)
        if fast:
            fast.qsgd_decode(codes, norms, self.bucket, self.levels, self.width, out, add)
        else:
            level = kernels.unpack(codes, out.numel(), self.width).to(torch.int64) - self.levels
            put(self._opened(level, norms), out, add)

    def _opened(self, level: Tensor, norms: Tensor) -> Tensor:
        unit = (norms / self.levels).repeat_interleave(self.bucket)[: level.numel()]
        return level.float() * unit


def _norms(buckets: Tensor, kind: str) -> Tensor:
    return buckets.abs().amax(1) if kind == "max" else buckets.norm(dim=1)
