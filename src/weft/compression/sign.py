from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft import kernels
from weft.compression._coded import Coded, numbers, put
from weft.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Sign(Coded):
    """Sends the sign of each value, one bit; the majority of workers decides [Bernstein et al. 2018].

    d / 8 + 4 bytes. The result is -1 or 1 (1 in a tie), so it needs its own learning rate. scaled: signs are weighted
    by the mean of |x| and averaged instead of put to a vote, which approximates the gradient and can be used inside
    error_feedback [Karimireddy et al. 2019].
    """

    scaled: bool = False
    """Send the mean of |x| as well, and average instead of voting."""

    @property
    def approximates(self) -> bool:
        return self.scaled

    def size(self, count: int, width: int) -> int:
        return 4 + -(-count // 8)

    def encode(
        self, x: Tensor, code: Tensor, width: int, key: int, residual: Tensor | None, pending: bool = False
    ) -> None:
        scale, bits = numbers(code, 1)
        fast = kernels.of(x)
        if fast:
            fast.sign_encode(x, bits, scale, self.scaled, residual, pending)
            return
        total = x.abs().sum(dtype=torch.float64)
        scale.copy_(total / x.numel() if self.scaled else total > 0)
        bits.copy_(kernels.pack(torch.signbit(x), 1))
        if residual is not None:
            torch.sub(x, torch.where(torch.signbit(x), -scale, scale), out=residual)

    def decode(self, code: Tensor, out: Tensor, width: int, add: bool) -> None:
        scale, bits = numbers(code, 1)
        fast = kernels.of(out)
        if fast:
            fast.onebit_decode(bits, torch.cat([scale, -scale]), out.numel(), out, add)
        else:
            put(torch.where(kernels.unpack(bits, out.numel(), 1).bool(), -scale, scale), out, add)

    def counted(self, x: Tensor) -> Tensor:
        return x if self.scaled else torch.where(x.any(), torch.where(torch.signbit(x), -1.0, 1.0), 0.0).to(x.dtype)

    def settle(self, total: Tensor) -> None:
        if not self.scaled:
            total.copy_(torch.where(total < 0, -1.0, 1.0))
