"""Complex parameters train as the same numbers in pairs of real ones do, under every compressor, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.process.harness import spawn
from tests.process.training import fit
from tests.pure.laws.test_compression import compressors
from weft.compression import Compressor

ROWS, COLUMNS = 64, 32


class Product(nn.Module):
    """x w, or x w* with the conjugate view that autograd then hands over."""

    def __init__(self, *, paired: bool, conjugate: bool) -> None:
        super().__init__()
        start = torch.randn(ROWS, COLUMNS, dtype=torch.complex64, generator=torch.Generator().manual_seed(7))
        self.w = nn.Parameter(torch.view_as_real(start).reshape(ROWS, -1).clone() if paired else start)
        self.conjugate = conjugate

    def complex(self) -> Tensor:
        return torch.view_as_complex(self.w.view(ROWS, COLUMNS, 2)) if self.w.is_floating_point() else self.w

    def forward(self, x: Tensor) -> Tensor:
        w = self.complex()
        return x.to(w.dtype) @ (w.conj() if self.conjugate else w)


def train(paired: bool, conjugate: bool, strategy: str | None = None) -> Tensor:
    run = weft.init(strategy, steps=4)
    model = Product(paired=paired, conjugate=conjugate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.distribute(model, optimizer)
    feed = [torch.randn(4, ROWS, generator=torch.Generator().manual_seed(i)) for i in range(40)]
    fit(model, optimizer, run.shard(feed), lambda model, x: (model(x) - 1j).abs().square().mean())
    run.close()
    return model.complex().detach().clone()


def close(one: Tensor, other: Tensor) -> bool:
    """Equal but for last bits: a complex number times a real one is rounded otherwise than its parts."""
    return torch.allclose(one, other, rtol=0, atol=1e-5)


def both(strategies: list[str]) -> list[tuple[Any, Any]]:
    return [(train(False, False, strategy), train(True, False, strategy)) for strategy in strategies]


def test_every_compressor_trains_both_parts() -> None:
    """One process carries two workers, and runs one strategy after the other."""
    every: list[Compressor] = compressors.args[1]
    start = Product(paired=False, conjugate=False).w.detach()
    (found,) = spawn(1, both, [f"bsp / direct / {each}" for each in every], workers=2)
    for compression, (mine, paired) in zip(every, found, strict=True):
        assert close(mine, paired), compression
        assert bool(((mine - start).imag != 0).any()), compression


@pytest.mark.parametrize("strategy", ["direct", "ring / cast", "parameter_server", "parameter_server / int8"])
def test_conjugate_gradients_between_processes(strategy: str) -> None:
    complex_, pairs = (spawn(2, train, paired, True, WEFT_STRATEGY=f"bsp / {strategy}") for paired in (False, True))
    assert torch.equal(complex_[0], complex_[1]) and close(complex_[0], pairs[0])
