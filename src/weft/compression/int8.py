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
class Int8(Coded):
    """Rounds each value to one of 255 levels of its block's maximum [Dettmers 2016].

    q = round(x / s), s = max|x| / 127 over a block: d + 4 d / block bytes. The error of a value is at most s / 2, or at
    most s and zero in expectation with stochastic rounding.
    """

    block: int = 1024
    """Values that share one scale."""
    stochastic: bool = False
    """Round up or down at random, so that the expected value is exact."""

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise ValueError(f"block is {self.block}, but must be a multiple of 8")

    @property
    def unbiased(self) -> bool:
        return self.stochastic

    def error(self, x: Tensor, spec: Spec) -> float:
        steps = _in_blocks(x, self.block).abs().amax(1).double() / 127
        most = steps.square().sum().mul(self.block).sqrt().item() * (1.0 if self.stochastic else 0.5)
        return most * (1 + 1e-4) + math.sqrt(x.numel()) * 1e-36

    def size(self, count: int, width: int) -> int:
        return 4 * -(-count // self.block) + count

    def grain(self, width: int) -> int:
        return self.block

    def encode(
        self, x: Tensor, code: Tensor, width: int, key: int, residual: Tensor | None, pending: bool = False
    ) -> None:
        scales, codes = self._parts(code, x.numel())
        fast = kernels.of(x)
        if fast:
            fast.int8_encode(x, self.block, codes, scales, residual, pending, key if self.stochastic else None)
            return
        blocks = _in_blocks(x, self.block)
        scale = blocks.abs().amax(1, keepdim=True) / 127
        inverse = torch.where(scale > 0, 1 / scale, 0)
        inverse.masked_fill_(inverse > 3.4e38, 0.0)
        q = blocks * inverse
        if self.stochastic:
            q = (q + kernels.uniform(q.numel(), key, x.device).view_as(q)).floor_()
        q = q.round_().clamp_(-127, 127)
        scales.copy_(torch.where(inverse > 0, scale, 0).view(-1))
        codes.copy_(q.view(-1)[: x.numel()])
        if residual is not None:
            torch.sub(x, (q * scales[:, None]).view(-1)[: x.numel()], out=residual)

    def decode(self, code: Tensor, out: Tensor, width: int, add: bool) -> None:
        scales, codes = self._parts(code, out.numel())
        fast = kernels.of(out)
        if fast:
            fast.int8_decode(codes, scales, self.block, out, add)
        else:
            put((_in_blocks(codes, self.block) * scales[:, None]).view(-1)[: out.numel()], out, add)

    def _parts(self, code: Tensor, count: int) -> tuple[Tensor, Tensor]:
        scales, codes = numbers(code, -(-count // self.block))
        return scales, codes.view(torch.int8)


def _in_blocks(x: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(x.float(), (0, -x.numel() % block)).view(-1, block)
