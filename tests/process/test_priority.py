"""Deferred steps, for real: each parameter is updated when its gradient arrives, and nobody sees it before that."""

from __future__ import annotations

import copy
import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.process.harness import spawn
from weft.profile import Measured
from weft.runtime.engine.engine import Engine
from weft.runtime.engine.lazy_parameter import LazyParameter, make_lazy, make_ready
from weft.runtime.modes.all_reduce import AllReduce

PRIORITY = "bsp / direct / priority(partition=512B, credit=2KiB, least=64B)"
PLAIN = "bsp / direct / wfbp"


def model_and_data(count: int) -> tuple[nn.Sequential, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(12, 24), nn.Tanh()]
    for _ in range(3):
        layers += [nn.Linear(24, 24), nn.Tanh()]
    rng = torch.Generator().manual_seed(4)
    data = [(torch.randn(4, 12, generator=rng), torch.randn(4, 5, generator=rng)) for _ in range(count)]
    return nn.Sequential(*layers, nn.Linear(24, 5)), data


# --- random delays --------------------------------------------------------------------------------------------------


def watched(steps: int, delays: bool) -> list[list[float]]:
    """Trains, and returns what each layer's weights added up to when its forward began."""
    if delays:
        put = Engine.again
        draw = random.Random(torch.initial_seed())

        def later(engine: Engine, act: Any) -> None:
            threading.Timer(draw.random() * 0.004, put, (engine, act)).start()

        Engine.again = later  # type: ignore[method-assign]
    run = weft.init(steps=steps)
    model, data = model_and_data(run.workers * steps)
    sums: list[list[float]] = []
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda m, _: sums[-1].append(m.weight.detach().double().sum().item()))
    model, optimizer = run.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
    late = 0
    for x, y in run.shard(data):
        sums.append([])
        late += any(type(p) is LazyParameter for p in model.parameters())
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if delays:
        assert late > steps / 2, "steps were not deferred"
    return sums


@pytest.mark.parametrize("topology", ["direct", "ring"])
def test_no_layer_starts_before_its_update_under_a_hundred_random_delays(topology: str) -> None:
    strategy = PRIORITY.replace("direct", topology)
    delayed = spawn(2, watched, 105, True, WEFT_STRATEGY=strategy)
    plain = spawn(2, watched, 105, False, WEFT_STRATEGY=PLAIN.replace("direct", topology))
    assert delayed == plain


# --- whoever touches ------------------------------------------------------------------------------------------------


def averages_weights(run: Any, model: Any, optimizer: Any, seen: list[Any]) -> None:
    with torch.no_grad():
        seen.append(torch.cat([p.reshape(-1) for p in model.parameters()]).double().sum().item())


def saves_the_model(run: Any, model: Any, optimizer: Any, seen: list[Any]) -> None:
    seen.append({key: value.clone() for key, value in model.state_dict().items()})


def saves_the_optimizer(run: Any, model: Any, optimizer: Any, seen: list[Any]) -> None:
    seen.append(copy.deepcopy(optimizer.state_dict()["state"]))


def copies_the_model(run: Any, model: Any, optimizer: Any, seen: list[Any]) -> None:
    seen.append(copy.deepcopy(model).state_dict())


def evaluates(run: Any, model: Any, optimizer: Any, seen: list[Any]) -> None:
    model.eval()
    with torch.no_grad():
        seen.append(model(torch.ones(2, 12)))
    model.train()


def looks_at_one_layer(run: Any, model: Any, optimizer: Any, seen: list[Any]) -> None:
    seen.append(model[8].weight.data.clone())


def overwrites_weights(run: Any, model: Any, optimizer: Any, seen: list[Any]) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)


def changes_the_rate(run: Any, model: Any, optimizer: Any, seen: list[Any]) -> None:
    """Right after step(), while its updates are on their way with the old one."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.7


def looks_at_gradients(run: Any, model: Any, optimizer: Any, seen: list[Any]) -> None:
    """After zero_grad() there are none, whatever is still on its way."""
    seen.append([p.grad is None for p in model.parameters()])


AFTER = {
    act.__name__: act
    for act in (
        *(averages_weights, saves_the_model, saves_the_optimizer, copies_the_model, evaluates, looks_at_one_layer),
        *(overwrites_weights, changes_the_rate, looks_at_gradients),
    )
}


def touching(name: str, clear: str) -> Any:
    run = weft.init(steps=10)
    model, data = model_and_data(run.workers * 10)
    model, optimizer = run.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
    seen: list[Any] = []
    for x, y in run.shard(data):
        if clear == "before":
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if clear == "after":
            optimizer.zero_grad()
        elif clear == "to zero":
            optimizer.zero_grad(set_to_none=False)
        if name != "looks_at_gradients" or clear == "after":
            AFTER[name](run, model, optimizer, seen)
    seen.append(model.state_dict())
    return seen


@pytest.mark.parametrize("name", AFTER)
def test_whoever_touches_a_parameter_waits_for_it(name: str) -> None:
    ours = spawn(2, touching, name, "after", WEFT_STRATEGY=PRIORITY)
    assert same(ours, spawn(2, touching, name, "after", WEFT_STRATEGY=PLAIN))


@pytest.mark.parametrize("clear", ["before", "to zero", "never"])
def test_gradients_are_cleared_as_the_loop_says(clear: str) -> None:
    ours = spawn(2, touching, "averages_weights", clear, WEFT_STRATEGY=PRIORITY)
    assert same(ours, spawn(2, touching, "averages_weights", clear, WEFT_STRATEGY=PLAIN))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def listening() -> list[str]:
    """What Weft says in this process from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft").addHandler(handler)
    return said


def clipping(look: bool) -> tuple[Any, list[str]]:
    said = listening()
    run = weft.init(steps=10)
    model, data = model_and_data(run.workers * 10)
    model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in run.shard(data):
        nn.functional.mse_loss(model(x), y).backward()
        if look:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), said


def test_who_looks_at_gradients_before_the_step_gets_means_and_is_told_once() -> None:
    ours = spawn(2, clipping, True, WEFT_STRATEGY=PRIORITY)
    plain = spawn(2, clipping, True, WEFT_STRATEGY=PLAIN)
    assert same([state for state, _ in ours], [state for state, _ in plain])
    assert [len([line for line in said if "are accessed between backward and step" in line]) for _, said in ours] == [
        1,
        1,
    ]
    assert not any(
        "are accessed between backward and step" in line
        for _, said in spawn(2, clipping, False, WEFT_STRATEGY=PRIORITY)
        for line in said
    )


def whole_step(kind: str) -> tuple[Any, list[str], bool]:
    said = listening()
    run = weft.init(steps=8)
    model, data = model_and_data(run.workers * 8)

    class Scaled(torch.optim.SGD):
        pass

    optimizer = (Scaled if kind == "another" else torch.optim.SGD)(model.parameters(), lr=0.1)
    if kind == "hooked":
        optimizer.register_step_post_hook(lambda *_: None)
    model, optimizer = run.distribute(model, optimizer)
    late = False
    for x, y in run.shard(data):
        nn.functional.mse_loss(model(x), y).backward()
        late = late or any(type(p) is LazyParameter for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), said, late


@pytest.mark.parametrize(("kind", "why"), [("another", "several parameters at once"), ("hooked", "a whole step")])
def test_what_needs_a_whole_step_gets_one_and_is_told_why(kind: str, why: str) -> None:
    ours = spawn(2, whole_step, kind, WEFT_STRATEGY=PRIORITY)
    plain = spawn(2, whole_step, kind, WEFT_STRATEGY=PLAIN)
    assert same([row[0] for row in ours], [row[0] for row in plain])
    assert all(any(why in line for line in said) and not late for _, said, late in ours)


# --- what was learnt ------------------------------------------------------------------------------------------------


def learning(folder: str) -> tuple[Any, Any]:
    run = weft.init(steps=6, out=folder)
    model, data = model_and_data(run.workers * 6)
    model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(run._process.mode, AllReduce)
    first = run._process.mode.engine.timetable
    for x, y in run.shard(data):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    last = run._process.mode.engine.timetable
    run.close()
    return first, last


@pytest.mark.parametrize("schedule", ["mg_wfbp", "priority(partition=512B, credit=2KiB, least=64B)"])
def test_what_the_first_steps_show_is_agreed_on_and_replayed(schedule: str, tmp_path: Path) -> None:
    strategy = f"bsp / direct / {schedule}"
    (_, one), (_, other) = spawn(2, learning, str(tmp_path), WEFT_STRATEGY=strategy)
    assert one == other, "all processes have one timetable"
    assert (tmp_path / "seen.json").exists()
    again = spawn(2, learning, str(tmp_path), WEFT_STRATEGY=strategy)
    assert all(first == last == one for first, last in again), "a run that goes on starts with what was learnt"
    seen = Measured.read(tmp_path / "seen.json")
    assert list(seen.ready_s.values()) == sorted(seen.ready_s.values())
    assert len(seen.cost.points) > 2


# --- late parameters, alone -----------------------------------------------------------------------------------------


def test_a_late_parameter_tells_what_it_is_without_waiting() -> None:
    param = nn.Parameter(torch.zeros(2, 3))
    touches: list[LazyParameter] = []

    def touched(late: LazyParameter) -> None:
        touches.append(late)
        make_ready(late)

    make_lazy(param, touched)
    assert isinstance(param, nn.Parameter) and param.shape == (2, 3) and param.requires_grad and param.numel() == 6
    assert {param: 1}[param] == 1 and not touches
    assert param.grad is None and len(touches) == 1 and type(param) is nn.Parameter
    make_lazy(param, touched)
    assert nn.functional.linear(torch.ones(1, 3), param).sum() == 0 and len(touches) == 2
