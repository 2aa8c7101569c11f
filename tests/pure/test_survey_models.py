"""The surveyed models as data: the published sizes, known costs, and a profile that adds up."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FILE = Path(__file__).resolve().parents[2] / "bench" / "survey_models.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("survey_models", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


models = load()
BOTH = pytest.mark.parametrize("layers", [models.resnet50(), models.bert_base()], ids=["resnet50", "bert_base"])


def named(layers: Any) -> dict[str, Any]:
    return {layer.name: layer for layer in layers}


def test_resnet50_has_torchvision_s_tensors_and_cost() -> None:
    layers = models.resnet50()
    assert len(layers) == 161
    assert sum(layer.parameters for layer in layers) == 25_557_032
    products = sum(layer.flops for layer in layers if len(layer.shape) > 1)
    assert products == 2 * 4_089_184_256
    assert sum(layer.flops for layer in layers) == pytest.approx(8.2e9, rel=0.01)


def test_resnet50_strides_in_the_3x3() -> None:
    layers = named(models.resnet50())
    assert layers["layer2_0_conv1_weight"].flops == 2 * 256 * 128 * 56**2
    assert layers["layer2_0_conv2_weight"].flops == 2 * 128 * 128 * 9 * 28**2


def test_bert_base_has_the_published_size() -> None:
    layers = models.bert_base()
    parameters = sum(layer.parameters for layer in layers)
    assert len(layers) == 206
    assert parameters == 110_106_428
    assert round(parameters / 1e6, 1) == 110.1 and round(parameters * 4 / 1e6, 1) == 440.4


def test_bert_base_costs_its_products() -> None:
    sequence = 64
    encoder = 12 * (2 * sequence * (4 * 768**2 + 2 * 768 * 3072) + 4 * sequence**2 * 768)
    heads = 2 * sequence * 768 * (768 + 30522) + 2 * 768 * (768 + 2)
    assert sum(layer.flops for layer in models.bert_base(sequence)) == pytest.approx(encoder + heads, rel=0.005)


def test_bert_base_decodes_early_in_backward_though_its_weight_comes_last() -> None:
    backward = models.profile(models.bert_base(), 1.0)["backward"]
    assert backward[-1][0] == "bert_embeddings_word_embeddings_weight"
    assert max(backward, key=lambda entry: entry[1])[0] == "cls_predictions_bias"


@pytest.mark.parametrize("sequence", [0, 513])
def test_bert_base_refuses_a_sequence_that_it_has_no_positions_for(sequence: int) -> None:
    with pytest.raises(ValueError, match=f"sequence is {sequence}"):
        models.bert_base(sequence)


@BOTH
def test_a_profile_holds_every_tensor_once_and_adds_up(layers: Any) -> None:
    profile = models.profile(layers, 0.2529)
    names = [name for name, _ in profile["backward"]]
    assert len(set(names)) == len(names)
    assert names == [layer.name for layer in reversed(layers)]
    assert all(seconds > 0 for _, seconds in profile["backward"])
    backward_s = sum(seconds for _, seconds in profile["backward"])
    assert backward_s == pytest.approx(2 * profile["forward_s"])
    assert profile["forward_s"] + backward_s + profile["optimizer_s"] == pytest.approx(0.2529)


@BOTH
def test_shapes_has_these_parameters_and_computes_nothing(layers: Any) -> None:
    with torch.device("meta"):
        model = models.Shapes(layers)
    found = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert found == [(layer.name, layer.shape) for layer in layers]
    assert not model(torch.zeros(1)).requires_grad


def test_shapes_are_zero() -> None:
    (parameter,) = models.Shapes([models.Layer("weight", (2, 3), 1.0)]).parameters()
    assert parameter.requires_grad and torch.equal(parameter, torch.zeros(2, 3))
