"""Every answer of an axis as a parameter of a test, so that a new file is held to the laws without being named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from weft.axis import Answer, catalogue, make
from weft.strategy import Strategy

_INNER = {"compression": "topk(ratio=0.3)", "synchrony": "asp"}


def needs(kind: type[Answer]) -> set[str]:
    """The fields without a default."""
    return {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}


def default(kind: type[Answer]) -> Any:
    """An answer with its default values; a wrapper around a simple answer."""
    return make(kind, dict.fromkeys(needs(kind), _INNER.get(kind.axis)))


def answers(axis: str, *more: str) -> list[Any]:
    """Every answer of an axis, and some with other values."""
    return [default(kind) for kind in catalogue(axis).values()] + [getattr(Strategy.parse(text), axis) for text in more]


def all_of(axis: str, *more: str) -> Any:
    """Parametrises with these answers."""
    return pytest.mark.parametrize(axis, answers(axis, *more), ids=str)
