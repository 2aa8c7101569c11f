"""Downpour as a value: what is due when, what it goes with, and what it sends."""

from __future__ import annotations

import pytest
import torch

from weft.errors import Conflict, SpellingError
from weft.lab.contender import Contender
from weft.ops import Spec
from weft.optimization.downpour import Downpour
from weft.strategy import Strategy


def test_pushes_and_fetches_are_due_after_whole_counts() -> None:
    due = [[exchange.what for exchange in Downpour(push=3, fetch=2).due(step)] for step in range(6)]
    assert due == [[], ["model"], ["gradient"], ["model"], [], ["gradient", "model"]]
    assert Downpour(push=4, fetch=6).period == 12


def test_a_fetched_model_takes_the_place_of_mine() -> None:
    mine, theirs = torch.zeros(2), torch.ones(2)
    assert Downpour().merge("worker", mine, theirs, {})[0] is theirs


def test_a_copy_moves_by_the_learning_rate_times_the_gradient() -> None:
    param, grad = torch.tensor([1.0, 2.0]), torch.tensor([4.0, -8.0])
    Downpour().local_update(param, grad, {"lr": 0.25, "momentum": 0.9})
    assert param.tolist() == [0.0, 4.0]
    Downpour().local_update(param, grad, {"lr": 0.25, "maximize": True})
    assert param.tolist() == [1.0, 2.0]


def test_a_payload_is_priced_as_a_push_to_the_servers() -> None:
    """A worker pushes a compressed gradient once; servers send whole models back."""
    specs, said = [Spec("w", (1000,)), Spec("b", (10,))], "asp / parameter_server(servers=2) / topk(ratio=0.1)"
    topk, dense = Contender(name="topk", strategy=Strategy.parse(said)), Strategy.parse("asp / parameter_server")
    assert topk.declared_bytes(specs, 4) == 8 * (100 + 1)
    assert topk.link_bytes(specs, 4) == 2 * 4 * 1010
    assert dense.push_bytes(specs) == 4 * 1010
    assert Contender(name="hogwild", strategy=Strategy.parse("asp / shared_memory")).declared_bytes(specs, 4) == 0


@pytest.mark.parametrize("name", ["push", "fetch"])
def test_no_step_is_too_few(name: str) -> None:
    with pytest.raises(SpellingError, match=f"{name} is 0, but must be at least 1"):
        Strategy.parse(f"downpour({name}=0)")


@pytest.mark.parametrize(
    ("text", "why", "remedy"),
    [
        ("downpour", "servers that keep the model, and direct has none", "downpour / asp / parameter_server"),
        ("downpour(push=2) / asp / ring", "ring has none", "downpour(push=2) / asp / parameter_server"),
        ("downpour / asp / shared_memory", "shared_memory has none", "downpour / asp / parameter_server"),
        ("downpour / bsp / colocated", "bsp compares the steps of all workers", "downpour / asp / colocated"),
        ("downpour / ssp / parameter_server", "report none between two exchanges", "downpour / asp / param"),
        ("downpour / staleness_weighted(ssp) / colocated", "compares the steps of all", "downpour / asp / colocated"),
        ("downpour / value_bound / parameter_server", "compares the steps of all", "downpour / asp / param"),
        (
            "downpour(fetch=2) / delay_compensated(asp) / colocated",
            "not sums over several local steps",
            "downpour / delay_compensated(asp) / colocated",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_could(text: str, why: str, remedy: str) -> None:
    with pytest.raises(Conflict) as found:
        Strategy.parse(text).check()
    assert why in found.value.why and found.value.instead.startswith(f"'{remedy}")
    for instead in found.value.instead.split(", or "):
        Strategy.parse(instead.strip("'")).check()


@pytest.mark.parametrize("synchrony", ["asp", "softsync(n=2)", "ssp(slack=inf)", "staleness_weighted(asp)"])
@pytest.mark.parametrize("schedule", ["fused", "wfbp", "sequential", "priority"])
def test_it_goes_with_whatever_nobody_waits_under(synchrony: str, schedule: str) -> None:
    text = f"downpour(push=5, fetch=2) / {synchrony} / parameter_server / topk / {schedule}"
    assert Strategy.parse(text).check()


def test_what_is_sent_now_and_then_is_priced_by_the_step() -> None:
    specs, said = [Spec("w", (1000,))], "asp / parameter_server(servers=2)"
    every = Contender(name="gradient", strategy=Strategy.parse(said))
    now_and_then = Contender(name="downpour", strategy=Strategy.parse(f"downpour(push=4, fetch=10) / {said}"))
    assert every.declared_bytes(specs, 4) == 4 * now_and_then.declared_bytes(specs, 4) == 4000
    assert every.link_bytes(specs, 4) == 4 * now_and_then.link_bytes(specs, 4)
    assert (every.period, now_and_then.period) == (1, 20)
    assert Downpour().summary in now_and_then.sentence
    assert every.sentence.startswith("Asynchronous")
