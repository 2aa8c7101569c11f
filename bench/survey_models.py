"""The models of [Shi et al. 2020] as shapes and costs: enough to send their gradients while computing is slept.

    python bench/survey_models.py            tensors, parameters and forward cost of each

Each tensor carries the forward cost of one sample where that time passes. A product's cost lies on its weight; a norm's
on its weight, its shift on its bias. Two products have no weight of their own at that place: the attention's scores and
mixing lie on `value`, whose gradient is the first that waits for them, and the decoder's product lies on the decoder's
bias, for its weight is the word embedding and that gradient is complete only at the very end of backward.

Costs are arithmetic only. Norms and activations are bound by memory and take a larger share of a GPU's time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

IMAGE, CLASSES = 224, 1000
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""ResNet-50's stages: width of the 3x3, blocks, stride of the first block."""
EXPANSION = 4
WORDS, POSITIONS, SEGMENTS, BLOCKS, WIDTH, INNER = 30522, 512, 2, 12, 768, 3072


@dataclass(frozen=True)
class Layer:
    """One parameter tensor, under the name that `Shapes` gives it."""

    name: str
    shape: tuple[int, ...]
    flops: float
    """Forward operations of one sample, a multiply-add counted as two."""

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)


def resnet50() -> tuple[Layer, ...]:
    """ResNet-50 [He et al. 2016] on 224x224, torchvision's v1.5 (the 3x3 strides): 161 tensors, 4.1 GMAC."""
    return tuple(_resnet50())


def bert_base(sequence: int = 64) -> tuple[Layer, ...]:
    """BERT-Base uncased [Devlin et al. 2019] with both heads of pre-training, the decoder tied: 206 tensors.

    The published 110.1 M (440.4 MB) needs the pooler (0.59 M), the transform of the masked-word head (0.59 M) and the
    decoder's bias (0.03 M) beside the 108.9 M of embeddings and blocks. The next-sentence head (1,538) is below that
    precision; without it the pooler would have no gradient. The masked-word head computes every position.
    """
    if not 1 <= sequence <= POSITIONS:
        raise ValueError(f"sequence is {sequence}, and BERT has {POSITIONS} positions: give 1 to {POSITIONS}")
    return tuple(_bert_base(sequence))


MODELS = {"resnet50": resnet50, "bert_base": bert_base}


def profile(layers: Sequence[Layer], compute_s: float) -> dict[str, Any]:
    """A step's computing in time: a third forward, two thirds backward, spread over the tensors by their cost.

    An entry of `backward` is the time that passes until the tensor's gradient is there, after the entry before it.
    """
    share_s = compute_s * 2 / 3 / sum(layer.flops for layer in layers)
    return {
        "forward_s": compute_s / 3,
        "backward": [[layer.name, layer.flops * share_s] for layer in reversed(layers)],
        "optimizer_s": 0.0,
    }


class Shapes(nn.Module):
    """A module with these parameters, in forward order and all zero, that computes nothing: for sleeping compute."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        for layer in layers:
            self.register_parameter(layer.name, nn.Parameter(torch.zeros(layer.shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _resnet50() -> Iterator[Layer]:
    side = IMAGE // 2
    yield from _convolution("conv1", "bn1", 3, 64, 7, side)
    side //= 2  # max pooling
    channels = 64
    for stage, (width, blocks, first) in enumerate(STAGES, start=1):
        for block in range(blocks):
            name, stride = f"layer{stage}_{block}", first if block == 0 else 1
            yield from _convolution(f"{name}_conv1", f"{name}_bn1", channels, width, 1, side)
            side //= stride
            yield from _convolution(f"{name}_conv2", f"{name}_bn2", width, width, 3, side)
            yield from _convolution(f"{name}_conv3", f"{name}_bn3", width, width * EXPANSION, 1, side)
            if block == 0:
                shortcut = f"{name}_downsample"
                yield from _convolution(f"{shortcut}_0", f"{shortcut}_1", channels, width * EXPANSION, 1, side)
            channels = width * EXPANSION
    yield from _linear("fc", channels, CLASSES, 1)


def _bert_base(sequence: int) -> Iterator[Layer]:
    outputs = sequence * WIDTH
    for kind, rows in (("word", WORDS), ("token_type", SEGMENTS), ("position", POSITIONS)):
        yield Layer(f"bert_embeddings_{kind}_embeddings_weight", (rows, WIDTH), float(outputs))
    yield from _norm("bert_embeddings_LayerNorm", WIDTH, outputs)
    for block in range(BLOCKS):
        name = f"bert_encoder_layer_{block}"
        scores = 2 * 2 * sequence * outputs  # query by key, then scores by value
        yield from _linear(f"{name}_attention_self_query", WIDTH, WIDTH, sequence)
        yield from _linear(f"{name}_attention_self_key", WIDTH, WIDTH, sequence)
        yield from _linear(f"{name}_attention_self_value", WIDTH, WIDTH, sequence, besides=scores)
        yield from _linear(f"{name}_attention_output_dense", WIDTH, WIDTH, sequence)
        yield from _norm(f"{name}_attention_output_LayerNorm", WIDTH, outputs)
        yield from _linear(f"{name}_intermediate_dense", WIDTH, INNER, sequence)
        yield from _linear(f"{name}_output_dense", INNER, WIDTH, sequence)
        yield from _norm(f"{name}_output_LayerNorm", WIDTH, outputs)
    yield from _linear("bert_pooler_dense", WIDTH, WIDTH, 1)
    yield from _linear("cls_predictions_transform_dense", WIDTH, WIDTH, sequence)
    yield from _norm("cls_predictions_transform_LayerNorm", WIDTH, outputs)
    yield Layer("cls_predictions_bias", (WORDS,), float(2 * outputs * WORDS + sequence * WORDS))
    yield from _linear("cls_seq_relationship", WIDTH, 2, 1)


def _convolution(name: str, norm: str, inputs: int, outputs: int, kernel: int, side: int) -> Iterator[Layer]:
    """A convolution without bias, onto side x side, and the batch norm after it."""
    shape = (outputs, inputs, kernel, kernel)
    yield Layer(f"{name}_weight", shape, float(2 * math.prod(shape) * side**2))
    yield from _norm(norm, outputs, outputs * side**2)


def _linear(name: str, inputs: int, outputs: int, rows: int, besides: int = 0) -> Iterator[Layer]:
    yield Layer(f"{name}_weight", (outputs, inputs), float(2 * rows * inputs * outputs + besides))
    yield Layer(f"{name}_bias", (outputs,), float(rows * outputs))


def _norm(name: str, channels: int, elements: int) -> Iterator[Layer]:
    """For each element: centre, divide, scale, which is the weight's; shift, which is the bias's."""
    yield Layer(f"{name}_weight", (channels,), float(3 * elements))
    yield Layer(f"{name}_bias", (channels,), float(elements))


def main() -> None:
    for name, layers in (("ResNet-50", resnet50()), ("BERT-Base", bert_base())):
        parameters, flops = sum(layer.parameters for layer in layers), sum(layer.flops for layer in layers)
        print(
            f"{name:10} {len(layers):4} tensors {parameters:>12,} parameters {flops / 1e9:7.3f} GFLOP forward a sample"
        )


if __name__ == "__main__":
    main()
