"""wide: an MLP with little to compute and much to send.

Its task is to agree with a fixed random teacher about Gaussian inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.jobs._common import Size, cross_entropy, evaluate, parse, parser, pick

SAMPLES, HELD_OUT = 8192, 1024
TEACHER_RANK = 4


@dataclass(frozen=True, kw_only=True)
class MlpSize(Size):
    """The shape of an MLP with three hidden layers."""

    inputs: int
    hidden: int
    classes: int


SIZES = {
    "tiny": MlpSize(inputs=32, hidden=64, classes=10, batch=32, lr=0.1),
    "1m": MlpSize(inputs=256, hidden=624, classes=100, batch=32, lr=0.05),
    "25m": MlpSize(inputs=1024, hidden=3072, classes=1000, batch=32, lr=0.05),
}


def build(size: str) -> nn.Sequential:
    """A new model, initialised from torch's global random numbers."""
    shape = pick(SIZES, size)
    widths = (shape.inputs, shape.hidden, shape.hidden, shape.hidden)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(shape.hidden, shape.classes))


def data(size: str, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """SAMPLES for training and HELD_OUT more, labelled by one teacher; inputs and teacher follow from `seed`.

    The teacher is linear of low rank, argmax(B A x): only a few directions of the input matter, so that a
    wide model can find them within a few hundred steps.
    """
    shape = pick(SIZES, size)
    random = torch.Generator().manual_seed(seed)
    project = torch.randn(shape.inputs, TEACHER_RANK, generator=random)
    score = torch.randn(TEACHER_RANK, shape.classes, generator=random)
    x = torch.randn(SAMPLES + HELD_OUT, shape.inputs, generator=random)
    y = (x @ project @ score).argmax(1)
    return TensorDataset(x[:SAMPLES], y[:SAMPLES]), TensorDataset(x[SAMPLES:], y[SAMPLES:])


def main() -> None:
    args = parse(parser(__doc__, SIZES, default="25m"), SIZES)
    run = weft.init(steps=200)
    train, held_out = data(args.size, run.seed)
    model = build(args.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model, optimizer = run.distribute(model, optimizer)
    loader = DataLoader(train, batch_size=args.batch, shuffle=True, drop_last=True)
    for x, y in run.shard(loader, epochs=None):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    mean, accuracy = evaluate(model, held_out, run.device)
    run.report(held_out_loss=mean, held_out_accuracy=accuracy)


if __name__ == "__main__":
    main()
