"""Laws of spelling: one spelling that round-trips, and a user error for any other text or table."""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.pure.laws.catalogues import needs
from weft.axis import AXES, Answer, catalogue
from weft.errors import UserError
from weft.strategy import Strategy
from weft.units import Size


def values_of(hint: Any, depth: int) -> st.SearchStrategy[Any]:
    if isinstance(hint, type) and issubclass(hint, Answer):
        return answers_of(hint.axis, depth + 1)
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    return {
        float: st.floats(0, 1, exclude_min=True) | st.floats(allow_nan=False),
        int: st.integers(0, 10**6) | st.integers(),
        bool: st.booleans(),
        str: st.text("abz019_ ./-", max_size=6),
        Size: (st.integers(1, 2**40) | st.integers(1, 64).map(lambda n: n * 2**20)).map(Size),
    }[hint]


@st.composite
def answers_of(draw: Any, axis: str, depth: int = 0) -> Answer:
    """Any answer of an axis, with any values that it accepts."""
    kinds = [kind for kind in catalogue(axis).values() if depth < 3 or "inner" not in needs(kind)]
    kind = draw(st.sampled_from(kinds))
    hints = typing.get_type_hints(kind)
    given = {
        field.name: draw(values_of(hints[field.name], depth))
        for field in dataclasses.fields(kind)
        if field.name in needs(kind) or draw(st.booleans())
    }
    try:
        return kind(**given)
    except ValueError:
        hypothesis.reject()


@st.composite
def strategies(draw: Any) -> Strategy:
    return Strategy(**{axis: draw(answers_of(axis)) for axis in AXES})


@hypothesis.given(strategy=strategies())
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
def test_one_spelling_that_round_trips(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy
    assert str(Strategy.parse(str(strategy))) == str(strategy)
    assert Strategy.from_toml(strategy.to_toml()) == strategy
    assert Strategy.from_table(strategy.spelled_out()) == strategy


words = [
    *(name for axis in AXES for name in catalogue(axis)),
    *AXES,
    "ratio",
    "inner",
    "bucket",
    "dtype",
    "bf16",
    "inf",
]
marks = [" / ", "(", ")", ",", "=", " ", "0.1", "-1", "25MiB", "1e999", '"', "'", "@", "true", "9" * 30]
fragments = st.lists(st.sampled_from(words + marks) | st.text(max_size=3), max_size=12).map("".join)


@st.composite
def nearly_spelled(draw: Any) -> str:
    """A strategy's spelling with one piece cut out or put in."""
    text = str(draw(strategies()))
    at, to = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    return text[:at] + draw(st.sampled_from(words + marks) | st.just("")) + text[to:]


@hypothesis.given(text=st.text() | fragments | nearly_spelled())
@hypothesis.settings(max_examples=500, deadline=None, derandomize=True)
def test_any_text_is_a_strategy_or_a_user_error(text: str) -> None:
    for read in (Strategy.parse, Strategy.from_toml):
        with contextlib.suppress(UserError):
            strategy = read(text)
            assert Strategy.parse(str(strategy)) == strategy


texts = st.sampled_from(words) | st.text(max_size=4)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "ratio", ""]), inner),
    max_leaves=4,
)


@st.composite
def nearly_right_tables(draw: Any) -> Any:
    """A strategy as a table with one value replaced by anything, wherever it stands, or one added."""
    table = draw(strategies()).spelled_out()
    place, key = draw(st.sampled_from([*entries(table), (table, "strategy"), (table["compression"], "")]))
    place[key] = draw(plain_values)
    return table


def entries(table: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    below = [entry for value in table.values() if isinstance(value, dict) for entry in entries(value)]
    return [(table, key) for key in table] + below


@hypothesis.given(table=plain_values | nearly_right_tables())
@hypothesis.settings(max_examples=500, deadline=None, derandomize=True)
def test_any_table_is_a_strategy_or_a_user_error(table: Any) -> None:
    with contextlib.suppress(UserError):
        strategy = Strategy.from_table(table)
        assert Strategy.parse(str(strategy)) == strategy


@pytest.mark.parametrize(
    "text",
    ["@\0", f"topk(ratio={'9' * 400})", f"topk(ratio={'9' * 5000})", f"fused(bucket={'9' * 5000})"],
    ids=["null", "400 digits", "5000 digits", "5000-digit size"],
)
def test_monstrous_text_is_a_user_error(text: str) -> None:
    with pytest.raises(UserError):
        Strategy.parse(text)


def test_deep_nesting_is_a_user_error() -> None:
    with pytest.raises(UserError, match="nested deeper"):
        Strategy.parse("error_feedback(" * 5000)
