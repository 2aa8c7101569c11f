"""A model whose state shows every difference of bits, and the answers under which bits are compared."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WORKERS = 4
SCHEDULES = (
    *("sequential", "wfbp", "fused(bucket=16KiB)", "mg_wfbp"),
    "priority(partition=4KiB, credit=16KiB, least=256B)",
)
COMPRESSIONS = ("dense", "cast(dtype=bf16)", "error_feedback(topk(ratio=0.1))")
MORE_COMPRESSIONS = (
    "int8(block=64, stochastic=true)",
    "error_feedback(onebit)",
    "sign",
    "error_feedback(twobit(threshold=0.001))",
    "terngrad",
    "qsgd(bucket=64)",
    "error_feedback(powersgd(rank=2))",
    "error_feedback(threshold(tau=0.001))",
    "error_feedback(adacomp(bin=50))",
    "error_feedback(gradient_dropping(drop=0.9))",
    "only(error_feedback(random_k(ratio=0.1)), min_numel=50)",
    "error_feedback(significant)",
    "sufficient_factors",
)
"""Under `direct` alone, with two schedules."""
TOPOLOGIES = ("direct", "ring", "halving_doubling", "recursive_doubling")


class Double(nn.Module):
    """A layer of another dtype, which needs a bucket of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.double()).float()


def model_with_dice() -> nn.Sequential:
    """Dropout draws from each worker's own stream; BatchNorm leaves buffers; about 60 KiB."""
    torch.manual_seed(5)
    layers: list[nn.Module] = [nn.Linear(13, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2)]
    layers += [nn.Linear(64, 101), nn.BatchNorm1d(101), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(101, 70, bias=False), nn.Tanh(), Double(nn.Linear(70, 3)))


def batches(steps: int, width: int = 13) -> DataLoader[Any]:
    rng = torch.Generator().manual_seed(8)
    count = 6 * WORKERS * steps
    x = torch.randn(count, width, generator=rng)
    return DataLoader(TensorDataset(x, x[:, :3].sin() + x[:, 3:6]), batch_size=6)


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from tensors_of(value[key])


def digest(*states: Any) -> str:
    """All tensors of nested states, as bits."""
    whole = hashlib.blake2b(digest_size=8)
    for tensor in itertools.chain.from_iterable(map(tensors_of, states)):
        whole.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()
