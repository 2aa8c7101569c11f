"""What the bundled jobs share: options, the loss, a learning-rate schedule and the held-out evaluation."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

Samples = Dataset[tuple[Tensor, ...]]
"""A map-style dataset of (input, target) pairs."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A named size of a job, and the options that suit it."""

    batch: int
    """Samples per worker and step."""
    lr: float
    """Peak learning rate."""


SizeT = TypeVar("SizeT", bound=Size)


def pick(sizes: Mapping[str, SizeT], name: str) -> SizeT:
    """The size called `name`; a ValueError that lists the sizes when there is none."""
    if name not in sizes:
        raise ValueError(f"no size {name!r}; choose one of {', '.join(sizes)}")
    return sizes[name]


def parser(about: str | None, sizes: Mapping[str, Size], default: str) -> argparse.ArgumentParser:
    """The options that every job has; help shows the first line of `about`, the module's docstring."""
    options = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    options.add_argument("--size", choices=tuple(sizes), default=default, help=f"model size ({default})")
    options.add_argument("--batch", type=int, help="samples per worker and step (by size)")
    options.add_argument("--lr", type=float, help="peak learning rate (by size)")
    return options


def positive(text: str) -> int:
    """A whole number of at least 1, as an option's type."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def parse(options: argparse.ArgumentParser, sizes: Mapping[str, Size]) -> argparse.Namespace:
    """Read the command line; the size fills in the batch and the learning rate that were not given."""
    args = options.parse_args()
    size = sizes[args.size]
    args.batch = size.batch if args.batch is None else args.batch
    args.lr = size.lr if args.lr is None else args.lr
    return args


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over all positions, in float32 whatever the precision of the logits."""
    return F.cross_entropy(logits.flatten(0, -2).float(), target.flatten())


def warmup_cosine(optimizer: Optimizer, steps: int | None, floor: float = 0.1) -> LambdaLR:
    """Linear warm-up for a tenth of `steps`, half a cosine down to `floor` of the peak, then flat."""
    steps = steps or 1
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(
    model: nn.Module, held_out: Samples, device: torch.device, *, batch: int = 64, batches: int | None = None
) -> tuple[float, float]:
    """Loss and accuracy over the first `batches` batches of `held_out` (None: all of it), in order.

    Neither random numbers nor the rank enter, so replicas with equal state get equal figures. The model
    computes in evaluation mode and is put back to training mode.
    """
    model.eval()
    loss, correct, count = 0.0, 0, 0
    random = torch.Generator()  # a loader draws a seed, even in order
    for x, y in islice(DataLoader(held_out, batch_size=batch, generator=random), batches):
        logits, target = model(x.to(device)), y.to(device)
        loss += cross_entropy(logits, target).item() * target.numel()
        correct += int((logits.argmax(-1) == target).sum())
        count += target.numel()
    model.train()
    return loss / count, correct / count
