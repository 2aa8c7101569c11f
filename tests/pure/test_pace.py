"""Stragglers and sleeping compute: what is drawn, what is slept, and that every gradient still comes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from weft.errors import SpellingError, UserError
from weft.profile import Profile
from weft.runtime.pace import Pace, Slow
from weft.units import Bandwidth


@pytest.mark.parametrize("text", ["4x", "1.5x", "4x@10%", "2x@0.5%"])
def test_a_slow_down_round_trips(text: str) -> None:
    assert str(Slow.parse(text)) == text


@pytest.mark.parametrize("text", ["4", "x", "0.5x", "4x@", "4x@120%", "-2x", ""])
def test_what_is_no_slow_down(text: str) -> None:
    with pytest.raises(SpellingError, match="4x"):
        Slow.parse(text)


def test_a_random_share_of_steps_follows_from_the_seed_alone() -> None:
    slow = Slow.parse("4x@10%")
    drawn = [slow.now(0, 1, step) for step in range(2000)]
    assert set(drawn) == {1.0, 4.0} and 120 < drawn.count(4.0) < 280
    assert drawn == [slow.now(0, 1, step) for step in range(2000)]
    assert drawn != [slow.now(1, 1, step) for step in range(2000)] != [slow.now(0, 2, step) for step in range(2000)]


@pytest.mark.parametrize(("text", "rate"), [("1gbit", 10**9), ("100mbit", 10**8), ("2.5Gbit/s", 25 * 10**8)])
def test_bandwidths(text: str, rate: int) -> None:
    assert Bandwidth.parse(text) == rate == Bandwidth.parse(str(Bandwidth(rate)))


@pytest.mark.parametrize("text", ["1", "gbit", "1 GB", "0mbit", "1e9bit"])
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(SpellingError, match="1gbit"):
        Bandwidth.parse(text)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


ORDER = ("2.bias", "2.weight", "0.bias", "0.weight")


def test_sleeping_compute_brings_every_gradient_in_the_profiles_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Profile(forward_s=0.0, backward=tuple((name, 0.0) for name in ORDER)).write(tmp_path / "profile.json")
    monkeypatch.setenv("WEFT_SLEEP", str(tmp_path / "profile.json"))
    net = model()
    start = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    Pace(0, 0, lambda: 0).attach(net, optimizer)
    seen: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    for _ in range(2):
        loss = net(torch.ones(5, 4)).square().mean()
        loss.backward()
        optimizer.step()
    assert tuple(seen) == ORDER * 2
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(start, net.parameters(), strict=True)), "nothing is learnt"


def test_a_profile_of_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Profile(forward_s=0.0, backward=(("else", 0.0),)).write(tmp_path / "profile.json")
    monkeypatch.setenv("WEFT_SLEEP", str(tmp_path / "profile.json"))
    net = model()
    with pytest.raises(UserError, match="disagree"):
        Pace(0, 0, lambda: 0).attach(net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_a_measured_profile_has_the_models_own_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_PROFILE", str(tmp_path / "profile.json"))
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    Pace(0, 0, lambda: 0).attach(net, optimizer)
    for _ in range(6):
        net(torch.ones(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    profile = Profile.read(tmp_path / "profile.json")
    assert sorted(name for name, _ in profile.backward) == sorted(ORDER)
    assert profile.backward[-1][0].startswith("0.")
    assert profile.compute_s > 0 and profile.scaled(2).compute_s == pytest.approx(2 * profile.compute_s)


def test_a_straggler_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for slow in ("", "3x"):
        monkeypatch.setenv("WEFT_SLOW", slow)
        torch.manual_seed(0)
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        Pace(0, 0, lambda: 0).attach(net, optimizer)
        net(torch.ones(5, 4)).square().mean().backward()
        optimizer.step()
        results.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
