"""Laws of optimizations: exchanges are periodic and as frequent as declared, and equal models stay equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.pure.laws.catalogues import all_of
from weft.errors import UserError
from weft.ops import Spec
from weft.optimization import LocalSteps, ModelMerging, Optimization, State
from weft.optimization._fragments import fragments

optimizations = all_of(
    "optimization",
    *("downpour(push=3)", "downpour(fetch=2)", "downpour(push=4, fetch=6)", "downpour(push=6, fetch=9)"),
    *("average(every=7)", "post_local(every=4)", "post_local(every=3, switch_at=5)", "sma(every=3, alpha=0.2)"),
    *("block_momentum(every=3, momentum=0.0)", "outer(every=5, nesterov=false)", "outer(every=2, momentum=0.0)"),
    *("streaming(every=7, fragments=3)", "streaming(every=5, fragments=5, delay=0)", "streaming(delay=40, mix=0.5)"),
)
WORKERS = 3


@optimizations
def test_exchanges_repeat_after_the_period(optimization: Optimization) -> None:
    assert optimization.period >= 1
    if isinstance(optimization, LocalSteps):
        for step in range(2 * optimization.period):
            assert optimization.due(step) == optimization.due(step + optimization.period)
    if isinstance(optimization, ModelMerging):
        start = -(-_first_phase(optimization) // optimization.period) * optimization.period
        for step in range(start, start + 2 * optimization.period):
            now, later = (
                [(merge.fragment, merge.finish_step - at) for merge in optimization.due(at)]
                for at in (step, step + optimization.period)
            )
            assert now == later


def _first_phase(optimization: Optimization) -> int:
    return getattr(optimization, "switch_at", 0)


@optimizations
def test_exchanges_are_as_frequent_as_declared(optimization: Optimization) -> None:
    if isinstance(optimization, LocalSteps):
        period = optimization.period
        for what, declared in (("gradient", optimization.pushes), ("model", optimization.fetches)):
            count = sum(each.what == what for step in range(period) for each in optimization.due(step))
            assert float(Fraction(count, period)) == declared


@optimizations
def test_every_fragment_is_merged_once_in_a_period(optimization: Optimization) -> None:
    """Each result is used in its period, before the fragment is sent again; two are never sent after one step."""
    if not isinstance(optimization, ModelMerging):
        return
    period, first = optimization.period, _first_phase(optimization)
    due = {step: optimization.due(step) for step in range(first, first + 4 * period)}
    for start in range(first, first + 3 * period):
        inside = [merge for step in range(start, start + period) for merge in due[step]]
        assert Counter(merge.fragment for merge in inside) == Counter(range(optimization.num_fragments))
    assert all(len(merges) <= 1 for merges in due.values())
    assert all(step <= merge.finish_step <= step + period for step, merges in due.items() for merge in merges)
    assert optimization.pushes == 1 / period and optimization.fetches == 0


@optimizations
def test_merging_equal_models_changes_nothing(optimization: Optimization) -> None:
    model = torch.randn(50, generator=torch.Generator().manual_seed(1))
    if isinstance(optimization, LocalSteps):
        merged, _ = optimization.merge("worker", model.clone(), model.clone(), {})
        assert torch.equal(merged, model)
    if isinstance(optimization, ModelMerging):
        state: State = {}
        for _ in range(3):
            merged, state = optimization.merge(model.clone(), torch.zeros(50), state, WORKERS)
            assert torch.equal(merged, model)
            assert torch.equal(optimization.adopt(model.clone(), model.clone(), merged, WORKERS), model)


def _merges(optimization: ModelMerging, spoil: Callable[[Tensor], None]) -> tuple[list[Tensor], State]:
    """Three merges whose arguments are spoiled after each."""
    rng, state = torch.Generator().manual_seed(1), State()
    found = []
    for _ in range(3):
        anchor, difference, copy = (torch.randn(20, generator=rng) for _ in range(3))
        given = anchor.clone(), difference.clone(), copy.clone()
        after, state = optimization.merge(*given[:2], state, WORKERS)
        found += [after.clone(), optimization.adopt(given[2], given[0], after, WORKERS).clone()]
        assert all(torch.equal(a, b) for a, b in zip(given, (anchor, difference, copy), strict=True)), "read-only"
        for each in given:
            spoil(each)
    return found, state


@optimizations
def test_a_merge_keeps_no_memory_of_its_arguments(optimization: Optimization) -> None:
    """The anchor and the difference are used again, so a state must not be one of them."""
    if isinstance(optimization, ModelMerging):
        plain, state = _merges(optimization, lambda _: None)
        spoiled, _ = _merges(optimization, lambda each: each.fill_(torch.nan))
        assert all(torch.equal(a, b) for a, b in zip(plain, spoiled, strict=True))
        assert sum(each.numel() for each in state.values()) == 20 * optimization.outer_copies
        assert optimization.copies == 3 + optimization.outer_copies


@optimizations
def test_a_merge_moves_the_anchor_towards_the_copies(optimization: Optimization) -> None:
    if isinstance(optimization, ModelMerging):
        anchor, copy = torch.zeros(4), torch.tensor([1.0, -1.0, 2.0, 0.0])
        after, _ = optimization.merge(anchor, anchor - copy, {}, WORKERS)
        assert bool((after * copy >= 0).all()) and bool((after * copy).any())
        assert bool((optimization.adopt(copy, anchor, after, WORKERS) * copy >= 0).all())


@optimizations
@pytest.mark.parametrize("maximize", [False, True])
def test_a_local_update_descends_or_ascends(optimization: Optimization, maximize: bool) -> None:
    if isinstance(optimization, LocalSteps):
        param, grad = torch.ones(4), torch.tensor([1.0, -1.0, 2.0, 0.0])
        optimization.local_update(param, grad, {"lr": 0.5, "maximize": maximize})
        moved = (param - 1) * grad
        assert bool((moved >= 0 if maximize else moved <= 0).all()) and bool(moved.any())


# --- fragments --------------------------------------------------------------------------------------------------------


def specs(*layers: tuple[int, ...]) -> list[Spec]:
    """Layers with parameters of these sizes."""
    named = [(f"layers.{at}.p{i}", size) for at, sizes in enumerate(layers) for i, size in enumerate(sizes)]
    return [Spec(name, (size,), torch.float32) for name, size in named]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 12])
def test_fragments_are_runs_of_whole_layers_of_about_equal_size(count: int) -> None:
    rng = torch.Generator().manual_seed(count)
    sizes = [tuple(torch.randint(1, 50, (2,), generator=rng).tolist()) for _ in range(12)]
    found = fragments(specs(*sizes), count)
    assert [i for inside in found for i in inside] == list(range(24)) and len(found) == count
    assert all(inside and inside[0] % 2 == 0 and len(inside) % 2 == 0 for inside in found)
    totals = [sum(sum(sizes[i // 2]) for i in inside[::2]) for inside in found]
    largest = max(map(sum, sizes))
    assert all(abs(total - sum(totals) / count) <= 2 * largest for total in totals)


def test_a_large_layer_does_not_leave_a_fragment_empty() -> None:
    assert fragments(specs((1000,), (1,), (1,)), 3) == [[0], [1], [2]]
    assert fragments(specs((1,), (1,), (1000,)), 2) == [[0, 1], [2]]
    assert fragments(specs((1,), (1,), (1000,)), 3) == [[0], [1], [2]]


def test_more_fragments_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match="the model has 2 layers, and cannot be merged in 3 fragments; use fewer"):
        fragments(specs((4, 2), (4, 2)), 3)
