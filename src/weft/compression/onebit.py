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
class Onebit(Coded):
    """Sends one bit per value, and two reconstruction values for each output's weights [Seide et al. 2014].

    The negative values of a row are decoded to their mean, the others to theirs: d / 8 bytes and 8 for each row. The
    paper's columns are an output's weights, which PyTorch stores as rows. Use inside error_feedback.
    """

    def size(self, count: int, width: int) -> int:
        return count // width * (8 + -(-width // 8))

    def grain(self, width: int) -> int:
        return width

    def encode(
        self, x: Tensor, code: Tensor, width: int, key: int, residual: Tensor | None, pending: bool = False
    ) -> None:
        values, bits = numbers(code, 2 * (x.numel() // width))
        fast = kernels.of(x)
        if fast:
            fast.onebit_encode(x, width, bits, values, residual, pending)
            return
        rows = x.view(-1, width)
        negative = torch.signbit(rows)
        down = torch.where(negative, rows, 0).double().sum(1) / negative.sum(1).clamp(min=1)
        up = torch.where(negative, 0, rows).double().sum(1) / (~negative).sum(1).clamp(min=1)
        values.view(-1, 2).copy_(torch.stack([up, down], 1))
        padded = torch.nn.functional.pad(negative, (0, -width % 8))
        bits.copy_(kernels.pack(padded.view(-1), 1))
        if residual is not None:
            torch.sub(x, _opened(negative, values).view(-1), out=residual)

    def decode(self, code: Tensor, out: Tensor, width: int, add: bool) -> None:
        rows = out.numel() // width
        values, bits = numbers(code, 2 * rows)
        fast = kernels.of(out)
        if fast:
            fast.onebit_decode(bits, values, width, out, add)
            return
        stride = -(-width // 8) * 8
        negative = kernels.unpack(bits, rows * stride, 1).view(rows, stride)[:, :width].bool()
        put(_opened(negative, values), out, add)


def _opened(negative: Tensor, values: Tensor) -> Tensor:
    up, down = values.view(-1, 2, 1).unbind(1)
    return torch.where(negative, down, up)
