"""Loops that servers would train wrong are refused; changes that they can follow reach them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import weft
from tests.process.commands import Command, gone
from tests.process.harness import ChildError, spawn
from tests.process.served_job import script


def misuse(between: str) -> None:
    """A loop that does something between backward and step."""
    run = weft.init(steps=3)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model.register_parameter("spare", nn.Parameter(torch.ones(3)))
    model[1].weight.requires_grad_(False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.distribute(model, optimizer)
    for x in run.shard([torch.ones(2, 4)] * 8):
        loss = model(x).square().mean()
        if between != "unused":
            (loss + model.spare.sum()).backward()
            exec(between)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


MISUSED = {
    "model[0].bias.data.clamp_(-0.1, 0.1)": "0.bias was changed outside of the optimizer",
    "model[0].bias.data = model[0].bias.data.clone()": "0.bias was changed outside of the optimizer",
    "model[0].bias.detach().numpy()[:] = 1.0": "a parameter was changed outside of the optimizer",
    "nn.utils.vector_to_parameters(torch.ones(61), model.parameters())": "spare was changed outside of the optimizer",
    "model.spare.grad = None": "the gradient of spare was replaced or removed",
    "model.spare.grad = torch.ones(3)": "the gradient of spare was replaced or removed",
    "model[1].weight.requires_grad_(True)": "1.weight was frozen in run.distribute()",
    "optimizer.add_param_group({'params': [nn.Parameter(torch.ones(1))]})": "the optimizer has other parameters",
    "optimizer.param_groups[0]['params'].pop()": "the optimizer has other parameters",
    "optimizer.state.clear()": "the servers have the optimizer's state",
    "optimizer.state[model.spare]['momentum_buffer'] = torch.zeros(3)": "the servers have the optimizer's state",
    "optimizer.state = {}": "the optimizer's state was changed",
    "optimizer.register_step_pre_hook(lambda o, *_: o.param_groups[0]['params'][0].grad.mul_(2) and None)": (
        "a gradient was used after it was pushed to the servers"
    ),
    "optimizer.register_step_post_hook(lambda o, *_: o.param_groups[0]['params'][0].data.zero_())": (
        "spare was changed outside of the optimizer"
    ),
    "optimizer.param_groups[0]['lr'] = lambda: 1.0": "The optimizer's lr is a function",
    "unused": "spare had no gradient at step 1",
    "optimizer.param_groups[0]['lr'] *= 2": "have changed between backward() and step()",
    "model[0].bias.detach().mul_(2)": "0.bias was changed outside of the optimizer",
    "optimizer.zero_grad = lambda: 0": "optimizer.zero_grad() in every step",
    "run.clip(1.0)": "leave it out there",
    "nn.utils.clip_grad_norm_(model.parameters(), 1.0)": "a gradient was used after it was pushed to the servers",
    "optimizer.load_state_dict(optimizer.state_dict())": "the servers have the optimizer's state",
    "(model(x).sum() + model.spare.sum()).backward()": "backward ran twice before step()",
}


@pytest.mark.parametrize("strategy", ["bsp / parameter_server", "asp / parameter_server / sequential"])
def test_gradients_of_the_step_before_are_not_added_to(strategy: str) -> None:
    with pytest.raises(ChildError, match=r"optimizer\.zero_grad\(\) in\s+every step"):
        spawn(1, misuse, "optimizer.zero_grad = lambda: 0", WEFT_STRATEGY=strategy)


def accumulate() -> list[float]:
    """A parameter that only a backward inside `accumulate` reaches, and not in every step."""
    run = weft.init(steps=4)
    torch.manual_seed(7)
    model: Any = nn.Linear(4, 2)
    model.register_parameter("spare", nn.Parameter(torch.ones(3)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model, optimizer = run.distribute(model, optimizer, unused=True)
    for x in run.shard([torch.full((2, 4), 0.1 * i) for i in range(8)]):
        with run.accumulate():
            loss = model(x).square().mean()
            (loss + model.spare.square().sum() if run.step % 2 else loss).backward()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [value for each in model.state_dict().values() for value in each.flatten().tolist()]
    run.close()
    return weights


@pytest.mark.parametrize("strategy", ["bsp / parameter_server / priority", "bsp / colocated / sequential"])
def test_what_was_accumulated_alone_counts(strategy: str) -> None:
    assert spawn(2, accumulate, WEFT_STRATEGY=strategy) == spawn(2, accumulate, WEFT_STRATEGY="bsp / direct")


@pytest.mark.parametrize("between", MISUSED)
def test_what_servers_would_train_wrong_is_refused(between: str) -> None:
    with pytest.raises(ChildError) as found:
        spawn(2, misuse, between, WEFT_STRATEGY="bsp / parameter_server / priority")
    assert found.value.kind == "LoopError" and MISUSED[between] in " ".join(str(found.value).split())


class Doubled(nn.Parameter):
    """A kind of parameter that a model may treat in another way."""


def unusual(kind: str) -> list[float]:
    """A loop that touches its parameters in another way than layers do; the model in the end."""
    run = weft.init(steps=4)
    torch.manual_seed(7)
    model: Any = nn.Linear(4, 2)
    if kind == "subclass":
        model.weight = Doubled(model.weight.detach())
    first = [model.weight] if kind == "two optimizers" else model.parameters()
    optimizer: Any = torch.optim.SGD(first, lr=0.1, momentum=0.5)
    model, optimizer = run.distribute(model, optimizer)
    second = torch.optim.SGD([model.bias], lr=0.1)
    for x in run.shard([torch.full((2, 4), 0.1 * i) for i in range(8)]):
        if kind == "func":
            out = torch.func.vmap(torch.func.grad(lambda each: model(each).square().sum()))(x)
        else:
            out = model(x) * (2 if isinstance(model.weight, Doubled) else 1)
        out.square().mean().backward()
        optimizer.step()
        if kind == "two optimizers":
            second.step()
            second.zero_grad()
        optimizer.zero_grad()
    weights = [value for p in model.parameters() for value in p.flatten().tolist()]
    run.close()
    return weights


@pytest.mark.parametrize("kind", ["subclass", "func"])
def test_parameters_that_are_late_are_what_they_were(kind: str) -> None:
    late, direct = (spawn(2, unusual, kind, WEFT_STRATEGY=f"bsp / {how}") for how in ("colocated / priority", "direct"))
    assert late == direct


def test_a_second_optimizer_is_refused_though_gradients_are_late() -> None:
    with pytest.raises(ChildError, match="a gradient was used after it was pushed to the servers"):
        spawn(2, unusual, "two optimizers", WEFT_STRATEGY="bsp / colocated / priority")


def test_a_parameter_that_leaves_shared_memory_is_refused() -> None:
    with pytest.raises(ChildError, match=r"0\.bias was moved to other memory"):
        spawn(2, misuse, "model[0].bias.data = model[0].bias.data.clone()", WEFT_STRATEGY="asp / shared_memory")


def changing(kind: str) -> list[float]:
    """A loop that changes the optimizer's options from step to step; the model in the end."""
    run = weft.init(steps=6)
    torch.manual_seed(7)
    model: Any = nn.Linear(4, 2).double()
    rate = torch.tensor(0.1) if kind == "tensor" else 0.1
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=rate, weight_decay=0.1, momentum=0.5)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5 if kind == "tensor" else 1.0)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(run.step))
    model, optimizer, scheduler = run.distribute(model, optimizer, scheduler)
    for x in run.shard([torch.full((2, 4), 0.1 * i, dtype=torch.float64) for i in range(20)]):
        group = optimizer.param_groups[0]
        if kind in CHANGES and run.step == 2:
            group.update(CHANGES[kind])
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    weights = [value for p in model.parameters() for value in p.flatten().tolist()]
    run.close()
    assert seen == list(range(6))
    return weights


CHANGES: dict[str, dict[str, Any]] = {
    "whole": {"lr": 0, "weight_decay": 0},
    "numpy": {"lr": numpy.float32(0.05), "momentum": numpy.int64(0)},
    "flag": {"maximize": True},
    "scalar": {"lr": torch.tensor(0.02), "weight_decay": numpy.float64(0.5)},
}


@pytest.mark.parametrize("kind", ["tensor", *CHANGES])
def test_options_that_change_reach_the_servers(kind: str) -> None:
    alone, served = (spawn(1, changing, kind, WEFT_STRATEGY=s) for s in ("bsp / direct", "bsp / parameter_server"))
    assert served == alone and served != spawn(1, changing, "", WEFT_STRATEGY="bsp / direct")


def replaced(kind: str) -> list[float]:
    """A model whose forward changes a buffer in place, or puts another tensor there; the buffer in the end."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> Any:
            now = 0.9 * self.mean + 0.1 * x.mean(0)
            self.calls = self.calls + 1
            if kind == "in place":
                self.mean.copy_(now)
            else:
                self.mean = now if kind == "replaced" else now.repeat(2)
            return self.inner(x - self.mean[:4])

    run = weft.init(steps=5)
    torch.manual_seed(7)
    model: Any = Mean()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.distribute(model, optimizer)
    for x in run.shard([torch.full((2, 4), float(i)) for i in range(20)]):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [float(model.calls), *model.mean.tolist(), *model.inner.weight.flatten().tolist()]
    run.close()
    return found


@pytest.mark.parametrize("strategy", ["bsp / direct", "bsp / colocated / priority", "essp(slack=0) / colocated"])
def test_a_buffer_that_counts_may_be_replaced_by_forward(strategy: str) -> None:
    first, *others = spawn(2, replaced, "in place", WEFT_STRATEGY=strategy)
    assert others == [first]
    assert first[0] == 5


@pytest.mark.parametrize("strategy", ["bsp / direct", "bsp / colocated / priority"])
def test_a_buffer_that_is_computed_anew_is_refused(strategy: str) -> None:
    with pytest.raises(ChildError, match="buffer mean was replaced by another tensor"):
        spawn(2, replaced, "replaced", WEFT_STRATEGY=strategy)


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    with pytest.raises(ChildError, match="buffer mean was replaced"):
        spawn(2, replaced, "longer", WEFT_STRATEGY="bsp / direct")


REFUSED = {
    "processes": (["--processes", "1"], {}, "a process for each worker"),
    "servers without work": (["--strategy", "bsp / parameter_server(servers=6)"], {}, "only 5 of them"),
    "optimizer": ([], {"optimizer": "LBFGS(model.parameters())"}, "may use several parameters at once"),
    "nodes without a key": (["--nodes", "3", "--rendezvous", "127.0.0.1:29999"], {}, "`weft key F` and copy it"),
    "nobody to join": (["--join", "1"], {}, "--join needs parameter servers and --rendezvous"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_servers_cannot_do_is_said(scratch: Path, case: str, weft: Command) -> None:
    args, how, sentence = REFUSED[case]
    script(scratch, **how)  # type: ignore[arg-type]
    done = weft("train", "job.py", "-n", 2, "--strategy", "bsp / parameter_server", *args, cwd=scratch)
    assert done.returncode == 2
    assert sentence in done.stdout + done.stderr
    assert gone(scratch)
