"""What a loop may do to its model past the exchange of gradients: the same as one process, or one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.process.harness import spawn

STEPS, WORKERS, BATCH = 9, 2, 3
STRATEGIES = {"direct": 2, "priority(partition=128B, credit=300B, least=64B)": 2, "fused": 1}
"""Schedules, and the processes that two workers run in."""


def mlp() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(5)
    rows = STEPS * WORKERS * BATCH
    x, y = (torch.randn(rows, width, generator=numbers, dtype=torch.float64) for width in (6, 3))
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


class Plain:
    """One process on the joined batch."""

    def distribute(self, *things: Any) -> Any:
        return things

    def shard(self, parts: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for at in range(0, len(parts), WORKERS):
            x, y = zip(*parts[at : at + WORKERS], strict=True)
            yield torch.cat(x), torch.cat(y)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def train(ground: Any, prepare: Callable[..., Any], act: Callable[..., Any]) -> list[Tensor]:
    """`prepare` runs after distribute; `act` takes backward, step and zero_grad into its own hands."""
    model = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = ground.distribute(model, optimizer)
    prepare(model, optimizer)
    for number, (x, y) in enumerate(ground.shard(batches())):
        act(number, model, optimizer, x, y)
    return [parameter.detach().clone() for parameter in model.parameters()]


def nothing(*_: Any) -> None:
    pass


def usual(_: int, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss_of(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


# --- what would drift apart -----------------------------------------------------------------------------------------


def grow(number: int, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    if number == 4:
        model.append(nn.Linear(3, 3).double())
        optimizer.add_param_group({"params": list(model[-1].parameters())})
    usual(number, model, optimizer, x, y)


def grow_in_place(number: int, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    if number == 4:
        model[2].bias = nn.Parameter(torch.randn(3).double())
    usual(number, model, optimizer, x, y)


def by_hand(_: int, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss_of(model, x, y), params), strict=True):
        param.grad = grad
    optimizer.step()
    optimizer.zero_grad()


def by_hand_in_place(number: int, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    if number < 2:
        return usual(number, model, optimizer, x, y)
    optimizer.zero_grad(set_to_none=False)
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss_of(model, x, y), params), strict=True):
        param.grad = grad if param.grad is None else param.grad.copy_(grad)
    return optimizer.step()


def hook_late(model: nn.Module, _: Any) -> None:
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-0.02, 0.02) and None)


def step_in_backward(model: nn.Module, _: Any) -> None:
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].register_full_backward_hook(lambda *_: second.step())  # type: ignore[operator]


class Second:
    """An optimizer that nobody has told Weft about."""

    def __init__(self) -> None:
        self.optimizer: Any = None

    def __call__(self, _: int, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        self.optimizer = self.optimizer or torch.optim.Adam(model.parameters())
        loss_of(model, x, y).backward()
        self.optimizer.step()
        optimizer.zero_grad()


REFUSED: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "a new layer": (nothing, grow, "was added after run.distribute()"),
    "a parameter in another's place": (nothing, grow_in_place, "was added after run.distribute()"),
    "a gradient by hand": (nothing, by_hand, "was set by hand"),
    "a gradient by hand, in place": (nothing, by_hand_in_place, "was set by hand"),
    "a late hook": (hook_late, usual, "a post-accumulate hook was registered"),
    "a step in backward": (step_in_backward, usual, "steps inside backward"),
    "a second optimizer": (nothing, Second(), "was not passed to run.distribute()"),
}


def refused(name: str) -> str:
    prepare, act, _ = REFUSED[name]
    run = weft.init()
    try:
        train(run, prepare, act)
        run.close()
    except weft.LoopError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("schedule", STRATEGIES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_others_do_not_see_is_refused(name: str, schedule: str) -> None:
    strategy = "bsp / direct" if schedule == "direct" else f"bsp / direct / {schedule}"
    for said in spawn(STRATEGIES[schedule], refused, name, workers=WORKERS, WEFT_STRATEGY=strategy):
        assert REFUSED[name][2] in said
        assert ";" in said, "a refusal has a remedy"


# --- what is as in one process, under priority ----------------------------------------------------------------------


def twice(_: int, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss_of(model, x, y).backward()
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()


def clip_in_a_hook(model: nn.Module, optimizer: Any) -> None:
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.05) and None)


def jacobian(_: int, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    slope = torch.func.vmap(torch.func.jacrev(lambda row: model(row[None])[0]))(x)
    (loss_of(model, x, y) + 0.1 * slope.square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


class Compiled:
    """The model, compiled after distribute."""

    def __call__(self, _: int, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss_of(torch.compile(model, backend="eager"), x, y).backward()  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()


EQUAL: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "plain": (nothing, usual),
    "two steps": (nothing, twice),
    "a hook on the optimizer": (clip_in_a_hook, usual),
    "a jacobian": (nothing, jacobian),
    "compiled": (nothing, Compiled()),
}


def equal(name: str) -> list[Tensor]:
    run = weft.init()
    values = train(run, *EQUAL[name])
    run.close()
    return values


@pytest.mark.parametrize("compression", ["dense", "sufficient_factors"])
@pytest.mark.parametrize("name", EQUAL)
def test_priority_is_as_one_process(name: str, compression: str) -> None:
    wanted = train(Plain(), *EQUAL[name])
    strategy = f"bsp / direct / {compression} / priority(partition=128B, credit=300B, least=64B)"
    for values in spawn(2, equal, name, WEFT_STRATEGY=strategy):
        for value, want in zip(values, wanted, strict=True):
            torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-12)


def two_backwards(_: int, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    out = model(x)
    (out - y).square().mean().backward(retain_graph=True)
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def stale(_: int, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """torch.func takes parameters in without asking them."""

    def whole(values: dict[str, Tensor]) -> Tensor:
        return (torch.func.functional_call(model, values, (x,)) - y).square().mean()

    torch.func.grad_and_value(whole)(dict(model.named_parameters()))[1].backward()
    optimizer.step()
    optimizer.zero_grad()


def overtaken(act: Callable[..., Any]) -> str:
    run = weft.init()
    try:
        train(run, nothing, act)
        run.close()
    except weft.LoopError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("act", [two_backwards, stale])
def test_a_gradient_that_overtakes_an_update_is_refused(act: Callable[..., Any]) -> None:
    strategy = "bsp / direct / priority(partition=128B, credit=300B, least=64B)"
    for said in spawn(2, overtaken, act, WEFT_STRATEGY=strategy):
        assert "has a new gradient while its last update is pending" in said


# --- several workers in one process ---------------------------------------------------------------------------------


def average(_: int, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    usual(_, model, optimizer, x, y)
    with torch.no_grad():
        torch.cat([param.flatten() for param in model.parameters()])


def decay(_: int, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    usual(_, model, optimizer, x, y)
    optimizer.param_groups[0]["lr"] *= 0.9


def forget(_: int, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    usual(_, model, optimizer, x, y)
    for kept in optimizer.state.values():
        kept["momentum_buffer"].zero_()


def clip_values(_: int, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss_of(model, x, y).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


ONCE = {
    average: "a parameter or its gradient was used between two workers' passes",
    clip_values: "a parameter or its gradient was used between two workers' passes",
    decay: "hyperparameters or the optimizer's state were changed between two workers' passes",
    forget: "hyperparameters or the optimizer's state were changed between two workers' passes",
}


@pytest.mark.parametrize("act", ONCE)
def test_code_that_acts_once_a_pass_is_refused_where_a_step_takes_several(act: Callable[..., Any]) -> None:
    [said] = spawn(1, overtaken, act, workers=2, WEFT_STRATEGY="bsp / direct")
    assert ONCE[act] in said
    assert ";" in said


def clip_norm(_: int, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss_of(model, x, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    model.zero_grad()
    with torch.no_grad():
        model(x)


EQUAL["clipped"] = (nothing, clip_norm)


def test_clipping_and_evaluating_are_as_in_one_process_where_a_step_takes_several_passes() -> None:
    wanted = train(Plain(), nothing, clip_norm)
    [values] = spawn(1, equal, "clipped", workers=2, WEFT_STRATEGY="bsp / direct")
    for value, want in zip(values, wanted, strict=True):
        torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-12)


class Counting(nn.Module):
    """Counts its calls in a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.inner(x)


def count() -> str:
    run = weft.init()
    model = Counting()
    model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for x, y in run.shard(batches()):
            usual(0, model, optimizer, x, y)
        run.close()
    except weft.LoopError as error:
        return str(error)
    return "nothing was noticed"


def test_a_module_that_counts_its_calls_is_refused_where_it_would_count_all_workers() -> None:
    [said] = spawn(1, count, workers=2, WEFT_STRATEGY="bsp / direct")
    assert "forward changes the number calls" in said
    assert spawn(2, count, WEFT_STRATEGY="bsp / direct") == ["nothing was noticed"] * 2
