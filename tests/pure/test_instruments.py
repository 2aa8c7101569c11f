"""Instruments: stragglers, sleeping compute, the profiler, and how a run finds them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import weft
from weft.errors import SpellingError, UserError
from weft.lab import child
from weft.lab.instruments.profiler import Profiler
from weft.lab.instruments.sleep import SleepingCompute
from weft.lab.instruments.straggler import Slow, Straggler
from weft.lab.peers.ddp import Ddp
from weft.profile import Profile
from weft.runtime.loop.instruments import attached, current, foreign
from weft.strategy import Strategy
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
    drawn = [slow.at(0, 1, step) for step in range(2000)]
    assert set(drawn) == {1.0, 4.0} and 120 < drawn.count(4.0) < 280
    assert drawn == [slow.at(0, 1, step) for step in range(2000)]
    assert drawn != [slow.at(1, 1, step) for step in range(2000)] != [slow.at(0, 2, step) for step in range(2000)]


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1gbit", 10**9),
        ("100mbit", 10**8),
        ("2.5Gbit/s", 25 * 10**8),
        ("1gbps", 10**9),
        ("1Gbps", 10**9),
        ("100MBPS", 10**8),
        ("5 kb/s", 5000),
        ("10bps", 10),
    ],
)
def test_bandwidths(text: str, rate: int) -> None:
    assert Bandwidth.parse(text) == rate == Bandwidth.parse(str(Bandwidth(rate)))


@pytest.mark.parametrize("text", ["1", "gbit", "1 GB", "1GBps", "1MB/s", "1gib", "1gb", "0mbit", "1e9bit"])
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(SpellingError, match="1gbit"):
        Bandwidth.parse(text)


@pytest.mark.filterwarnings("error")
def test_a_straggler_keeps_the_mark_of_a_scheduler() -> None:
    """PyTorch warns where a step that a scheduler has wrapped is replaced by one without its mark."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    Straggler(slow=Slow.parse("2x")).attach(RUN, net, optimizer)
    net(torch.ones(5, 4)).sum().backward()
    optimizer.step()
    scheduler.step()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


ORDER = ("2.bias", "2.weight", "0.bias", "0.weight")


def run(rank: int = 0, strategy: str = "bsp / direct") -> Any:
    return SimpleNamespace(
        seed=0, rank=rank, step=0, strategy=Strategy.parse(strategy), world=SimpleNamespace(process=rank)
    )


RUN: Any = run()


def test_sleeping_compute_brings_every_gradient_in_the_profiles_order() -> None:
    profile = Profile(forward_s=0.0, backward=tuple((name, 0.0) for name in ORDER))
    net = model()
    start = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    SleepingCompute(profile=profile).attach(RUN, net, optimizer)
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


def slept(rank: int, strategy: str, steps: int = 1, lr: float = 0.1) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients, and the changes of the parameters, of some steps of sleeping compute."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(60, 50), nn.Linear(50, 40))
    start = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    names = [name for name, _ in net.named_parameters()]
    instrumented = run(rank, strategy)
    profile = Profile(forward_s=0.0, backward=tuple((name, 0.0) for name in reversed(names)))
    SleepingCompute(profile=profile).attach(instrumented, net, optimizer)
    for step in range(steps):
        instrumented.step = step
        optimizer.zero_grad()
        net(torch.ones(5, 60)).square().mean().backward()
        optimizer.step()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return grads, [p.detach() - before for p, before in zip(net.parameters(), start, strict=True)]


def test_sleeping_compute_has_other_gradients_in_each_process() -> None:
    first, again, other = (slept(rank, "bsp / direct")[0] for rank in (0, 0, 1))
    assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, other))


def test_sleeping_compute_changes_the_models_of_local_optimizers_as_much_as_adamw() -> None:
    """By the learning rate times numbers of unit variance, which differ between steps, workers and parameters."""
    strategy = "average(every=4) / bsp / direct"
    for steps in (1, 9):
        flat = torch.cat([change.flatten() for change in slept(0, strategy, steps, lr=0.01)[1]])
        assert flat.std() == pytest.approx(0.01 * steps**0.5, rel=0.1) and abs(flat.mean()) < 0.002
    first, again, other = (slept(rank, strategy)[1] for rank in (0, 0, 1))
    assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, other))
    for text in ("bsp / direct", "ssp(slack=2) / parameter_server", "downpour / asp / parameter_server"):
        assert not any(change.any() for change in slept(0, text)[1]), text


def test_a_profile_of_another_model_is_refused() -> None:
    instrument = SleepingCompute(profile=Profile(forward_s=0.0, backward=(("else", 0.0),)))
    net = model()
    with pytest.raises(UserError, match="disagree"):
        instrument.attach(RUN, net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_a_measured_profile_has_the_models_own_order(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    Profiler(file=tmp_path / "profile.json").attach(RUN, net, optimizer)
    for _ in range(6):
        net(torch.ones(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    profile = Profile.read(tmp_path / "profile.json")
    assert sorted(name for name, _ in profile.backward) == sorted(ORDER)
    assert profile.backward[-1][0].startswith("0.")
    assert profile.compute_s > 0 and profile.scaled(2).compute_s == pytest.approx(2 * profile.compute_s)


def test_a_straggler_changes_no_result() -> None:
    results = []
    for slow in ("1x", "3x"):
        torch.manual_seed(0)
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        Straggler(slow=Slow.parse(slow)).attach(RUN, net, optimizer)
        net(torch.ones(5, 4)).square().mean().backward()
        optimizer.step()
        results.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- attaching ------------------------------------------------------------------------------------------------------


class Recorder:
    """An instrument that records its runs."""

    def __init__(self) -> None:
        self.runs: list[Any] = []

    def attach(self, run: Any, model: nn.Module, optimizer: Optimizer) -> None:
        self.runs.append(run)


def test_instruments_are_those_of_the_context() -> None:
    outer, inner = Recorder(), Recorder()
    with attached(outer):
        with attached(inner):
            assert current() == (outer, inner)
        assert current() == (outer,) and foreign() is None
        with attached(peer := Ddp()):
            assert foreign() is peer
    assert current() == () and foreign() is None


def test_a_run_attaches_the_instruments_of_its_context() -> None:
    recorder = Recorder()
    net = model()
    with attached(recorder):
        run = weft.init()
        try:
            run.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1))
        finally:
            run.close()
    assert recorder.runs == [run._process]


def test_the_environment_chooses_the_instruments(tmp_path: Path) -> None:
    profile = Profile(forward_s=0.5, backward=(("w", 0.5),))
    profile.write(tmp_path / "profile.json")
    slow, sleep = {"WEFT_SLOW": "4x@10%"}, {"WEFT_SLEEP": str(tmp_path / "profile.json")}
    assert child.instruments({}) == child.instruments({"WEFT_SLOW": "", "WEFT_PEER": ""}) == []
    assert child.instruments(slow) == [Straggler(slow=Slow(4.0, 0.1))]
    assert child.instruments(slow | sleep) == [SleepingCompute(profile=profile, slow=Slow(4.0, 0.1))]
    assert child.instruments({"WEFT_PROFILE": "p.json"}) == [Profiler(file=Path("p.json"))]
    assert [type(each) for each in child.instruments({"WEFT_PEER": "ddp"})] == [Ddp]
