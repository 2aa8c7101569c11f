"""vision: a small ResNet with BatchNorm that tells ten drawn shapes and textures apart.

The images are drawn on the spot. The model is the CIFAR ResNet [He et al. 2016, section 4.2] with projections
where the shape changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.jobs._common import Size, cross_entropy, evaluate, parse, parser, pick, warmup_cosine

CLASSES = 10
SIDE = 32
NOISE = 1.0


@dataclass(frozen=True, kw_only=True)
class ResNetSize(Size):
    """The shape of a ResNet with three stages, and how many images it is trained and judged on."""

    blocks: int
    """Blocks per stage; the depth is 6 blocks + 2."""
    width: int
    """Channels of the first stage; they double with every stage."""
    train: int
    held_out: int


SIZES = {
    "tiny": ResNetSize(blocks=1, width=8, train=512, held_out=128, batch=32, lr=0.1),
    "8": ResNetSize(blocks=1, width=16, train=4096, held_out=512, batch=64, lr=0.1),
    "20": ResNetSize(blocks=3, width=16, train=4096, held_out=512, batch=64, lr=0.1),
}


def conv_norm(before: int, after: int, kernel: int, stride: int) -> nn.Sequential:
    """A convolution that keeps the image's size (at stride 1) and a BatchNorm."""
    conv = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after))


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(before, after, 3, stride)
        self.second = conv_norm(after, after, 3, 1)
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else conv_norm(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def build(size: str) -> nn.Sequential:
    """A new model, initialised from torch's global random numbers."""
    shape = pick(SIZES, size)
    layers: list[nn.Module] = [conv_norm(3, shape.width, 3, 1), nn.ReLU()]
    channels = shape.width
    for stage in range(3):
        for block in range(shape.blocks):
            after, stride = shape.width * 2**stage, 2 if stage > 0 and block == 0 else 1
            layers.append(Block(channels, after, stride))
            channels = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def draw(label: int, x: Tensor, y: Tensor) -> Tensor:
    """The shape or texture of a class at the points (x, y): 0 is background, 1 foreground.

    Shapes are about 1 in radius, textures have a period of 1.
    """
    radius = (x**2 + y**2).sqrt()
    far, near = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    stripes_x, stripes_y = (torch.sin(2 * math.pi * axis) > 0 for axis in (x, y))
    match label:
        case 0:  # upright stripes
            return stripes_x.float()
        case 1:  # level stripes
            return stripes_y.float()
        case 2:  # slanted stripes
            return (torch.sin(2 * math.pi * (x + y)) > 0).float()
        case 3:  # checkerboard
            return (stripes_x ^ stripes_y).float()
        case 4:  # disc
            return (radius < 1).float()
        case 5:  # ring
            return ((radius > 0.6) & (radius < 1)).float()
        case 6:  # square frame
            return ((far > 0.6) & (far < 1)).float()
        case 7:  # cross
            return ((near < 0.25) & (far < 1)).float()
        case 8:  # level gradient
            return torch.sigmoid(y)
        case 9:  # glow
            return torch.exp(-radius)
    raise AssertionError(label)


def images(count: int, random: torch.Generator) -> TensorDataset:
    """Images (3, SIDE, SIDE) about 0 and their classes, with random position, scale, colours and noise."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=random)

    labels = torch.randint(CLASSES, (count,), generator=random)
    scale = uniform(6, 10, 1, 1)
    line = torch.arange(SIDE) - SIDE / 2
    x = ((line[None, None, :] - uniform(-6, 6, 1, 1)) / scale).expand(count, SIDE, SIDE)
    y = ((line[None, :, None] - uniform(-6, 6, 1, 1)) / scale).expand(count, SIDE, SIDE)
    mask = torch.empty(count, 1, SIDE, SIDE)
    for label in range(CLASSES):
        chosen = labels == label
        mask[chosen, 0] = draw(label, x[chosen], y[chosen])
    background, foreground = uniform(-1, -0.2, 3, 1, 1), uniform(0.2, 1, 3, 1, 1)
    # Half of the images are negatives, so that brightness does not tell the class.
    sign = uniform(-1, 1, 1, 1, 1).sign()
    noise = torch.randn(count, 3, SIDE, SIDE, generator=random)
    return TensorDataset(sign * torch.lerp(background, foreground, mask) + NOISE * noise, labels)


def data(size: str, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images; both follow from `seed`."""
    shape = pick(SIZES, size)
    random = torch.Generator().manual_seed(seed)
    return images(shape.train, random), images(shape.held_out, random)


def groups(model: nn.Module, weight_decay: float = 5e-4) -> list[dict[str, object]]:
    """Two parameter groups: weight decay for weights, none for norms and biases (one dimension)."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def main() -> None:
    args = parse(parser(__doc__, SIZES, default="8"), SIZES)
    run = weft.init(steps=200)
    train, held_out = data(args.size, run.seed)
    model = build(args.size)
    optimizer = torch.optim.SGD(groups(model), lr=args.lr, momentum=0.9)
    scheduler = warmup_cosine(optimizer, run.steps)
    model, optimizer, scheduler = run.distribute(model, optimizer, scheduler)
    loader = DataLoader(train, batch_size=args.batch, shuffle=True, drop_last=True)
    for x, y in run.shard(loader, epochs=None):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.log(loss=loss)
    mean, accuracy = evaluate(model, held_out, run.device)
    run.report(held_out_loss=mean, held_out_accuracy=accuracy)


if __name__ == "__main__":
    main()
