"""The figures on learning are those of the documentation, and belong to strategies that were measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.lab import learning
from weft.lab.contender import Contender
from weft.strategy import Strategy

PAGE = Path(__file__).parents[2] / "docs/compression.md"


def strategy(text: str) -> Contender:
    return Contender(name=text, strategy=Strategy.parse(text))


def documented() -> dict[str, float]:
    """The first row of each compressor in the table, in its canonical spelling."""
    section = PAGE.read_text(encoding="utf-8").partition("## Effect on learning")[2]
    rows = re.findall(r"(?m)^\| `([^`]+)` \|.*\| \**([\d.]+)\** \|$", section)
    found: dict[str, float] = {}
    for text, ratio in rows:
        found.setdefault(str(Strategy.parse(f"bsp / direct / {text}").compression), float(ratio))
    return found


def test_the_table_is_that_of_the_documentation() -> None:
    assert documented() == learning.HELD_OUT and len(learning.HELD_OUT) > 25


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        ("bsp / direct", 1.0),
        ("bsp / ring / priority", 1.0),
        ("bsp / direct / sufficient_factors", 1.0),
        ("bsp / ring / int8 / wfbp", 1.001),
        ("bsp / direct / error_feedback(topk(ratio=0.01))", 1.681),
        ("bsp / direct / error_feedback(topk(ratio=0.02))", None),
        ("bsp / parameter_server", 1.0),
        ("bsp / parameter_server / int8", None),
        ("asp / parameter_server", None),
        ("downpour / asp / parameter_server", None),
    ],
)
def test_what_a_strategy_is_measured_as(text: str, ratio: float | None) -> None:
    assert learning.measured(strategy(text)) == ratio


@pytest.mark.parametrize(
    ("peer", "ratio"), [("ddp", 1.0), ("fsdp", 1.0), ("ddp-fp16", 1.0), ("ddp-powersgd", None), ("ddp-localsgd", None)]
)
def test_what_a_peer_is_measured_as(peer: str, ratio: float | None) -> None:
    assert learning.measured(Contender(name=peer, peer=peer)) == ratio


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.0, "as dense"),
        (0.938, "as dense"),
        (1.004, "as dense"),
        (1.013, "+1 % held-out loss"),
        (None, "not measured"),
    ],
)
def test_in_words(ratio: float | None, text: str) -> None:
    assert learning.text(ratio) == text
    assert learning.as_dense(ratio) == (ratio is not None)
