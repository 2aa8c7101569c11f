"""Laws of optimizations: exchanges are periodic and as frequent as declared, and equal models stay equal."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from tests.pure.laws.catalogues import all_of
from weft.optimization import LocalSteps, Optimization

optimizations = all_of(
    *("optimization", "downpour(push=3)", "downpour(fetch=2)", "downpour(push=4, fetch=6)", "downpour(push=6, fetch=9)")
)


@optimizations
def test_exchanges_repeat_after_the_period(optimization: Optimization) -> None:
    assert optimization.period >= 1
    if isinstance(optimization, LocalSteps):
        for step in range(2 * optimization.period):
            assert optimization.due(step) == optimization.due(step + optimization.period)


@optimizations
def test_exchanges_are_as_frequent_as_declared(optimization: Optimization) -> None:
    if isinstance(optimization, LocalSteps):
        period = optimization.period
        for what, declared in (("gradient", optimization.pushes), ("model", optimization.fetches)):
            count = sum(each.what == what for step in range(period) for each in optimization.due(step))
            assert float(Fraction(count, period)) == declared


@optimizations
def test_merging_equal_models_changes_nothing(optimization: Optimization) -> None:
    if isinstance(optimization, LocalSteps):
        model = torch.randn(50, generator=torch.Generator().manual_seed(1))
        merged, _ = optimization.merge("worker", model.clone(), model.clone(), {})
        assert torch.equal(merged, model)


@optimizations
@pytest.mark.parametrize("maximize", [False, True])
def test_a_local_update_descends_or_ascends(optimization: Optimization, maximize: bool) -> None:
    if isinstance(optimization, LocalSteps):
        param, grad = torch.ones(4), torch.tensor([1.0, -1.0, 2.0, 0.0])
        optimization.local_update(param, grad, {"lr": 0.5, "maximize": maximize})
        moved = (param - 1) * grad
        assert bool((moved >= 0 if maximize else moved <= 0).all()) and bool(moved.any())
