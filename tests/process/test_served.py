"""`weft train` with parameter servers: the same losses as without where that is promised, and refusals elsewhere."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import weft
from tests.process.harness import ChildError, spawn
from tests.process.test_launch import WEFT, gone, scratch
from tests.process.test_launch import weft as command
from weft.runtime.record.run_folder import events

__all__ = ["scratch"]

JOB = """
import os, time
import torch, weft
from torch import nn

run = weft.init(steps=12)
torch.manual_seed(int(os.environ.get("WEFT_SERVER", 7)))  # servers build another model: worker 0's counts
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), {layer}nn.Linear(8, 2))
model.register_parameter("spare", nn.Parameter(torch.ones(3)))
optimizer = torch.optim.{optimizer}
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
model, optimizer, scheduler = run.distribute(model, optimizer, scheduler, unused={unused})
data = [torch.full((3, 4), 0.1 * float(i)) + torch.arange(3.0).view(3, 1) for i in range(24)]
for x in run.shard(data, epochs=None):
    time.sleep({sleep})
    with run.accumulate():
        (model(x) - 2).square().mean().backward()
    loss = (model(x).sin() - 1).square().mean() + {spare}
    loss.backward()
    {between}
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    run.log(loss=loss)
print(" ".join(p.double().sum().item().hex() for p in model.state_dict().values()))
"""
ADAM = "Adam(model.parameters(), lr=0.01)"
SGD = "SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)"


def script(
    folder: Path,
    optimizer: str = ADAM,
    between: str = "pass",
    layer: str = "",
    sleep: float = 0.0,
    unused: bool = False,
    spare: str = "0 * model.spare.sum()",
) -> None:
    how = {"optimizer": optimizer, "between": between, "layer": layer, "sleep": sleep, "unused": unused, "spare": spare}
    (folder / "job.py").write_text(JOB.format(**how))


def trained(folder: Path, strategy: str, out: str, *args: str) -> tuple[list[float], set[str]]:
    """Losses, and what the workers say of their last models."""
    done = command("train", "job.py", "-n", 3, "--strategy", strategy, "--out", out, *args, cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    words = {line.split("] ", 1)[1] for line in done.stdout.splitlines() if "0x" in line}
    return [event["loss"] for event in events(folder / out)], words


def learn(kind: str, layer: str, unused: bool) -> tuple[list[float], list[float]]:
    """Losses of each step, and the model in the end."""
    run = weft.init(steps=9)
    torch.manual_seed(int(os.environ.get("WEFT_SERVER", 7)))  # servers build another model: worker 0's counts
    layers = {"norm": [nn.BatchNorm1d(8)], "dice": [nn.Dropout(0.2)]}.get(layer, [])
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *layers, nn.Linear(8, 2))
    model.register_parameter("spare", nn.Parameter(torch.ones(3)))
    optimizer: Any = OPTIMIZERS[kind](model.parameters())
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = run.distribute(model, optimizer, scheduler, unused=unused)
    data = [torch.full((3, 4), 0.1 * i) + torch.arange(3.0).view(3, 1) for i in range(20)]
    losses = []
    for x in run.shard(data, epochs=None):  # the last step of an epoch has batches for two workers of three
        loss = (model(x).sin() - 1).square().mean()
        if not unused or (run.rank + run.step) % 4 == 0:
            loss = loss + model.spare.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    weights = [value for each in model.state_dict().values() for value in each.double().flatten().tolist()]
    run.close()
    return losses, weights


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain": lambda p: torch.optim.SGD(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}
LIKE_DIRECT = {
    "one server": ("adam", "", False, "bsp / parameter_server"),
    "priority": ("adam", "", False, "bsp / parameter_server(servers=3) / priority"),
    "no slack": ("nesterov", "dice", False, "ssp(slack=0) / parameter_server(servers=2)"),
    "eager, no slack": ("nesterov", "norm", False, "essp(slack=0) / parameter_server(servers=2)"),
    "eager and urgent": ("adam", "dice", True, "essp(slack=0) / colocated / priority(least=1B)"),
    "sequential": ("nesterov", "", False, "bsp / colocated / sequential"),
    "encrypted": ("adam", "", False, "bsp / colocated(encrypted=true) / wfbp"),
    "batchnorm": ("adam", "norm", False, "bsp / colocated / priority(least=1B)"),
    "unused": ("adam", "", True, "bsp / parameter_server(servers=2)"),
    "groups": ("adam", "norm", False, "bsp / hierarchical(groups=2, servers=2) / priority"),
    "groups of one": ("nesterov", "", True, "ssp(slack=0) / hierarchical(groups=3)"),
    "whole parameters": ("adafactor", "", False, "bsp / parameter_server(servers=2)"),
}


@functools.cache
def direct(kind: str, layer: str, unused: bool) -> list[Any]:
    return spawn(3, learn, kind, layer, unused, WEFT_STRATEGY="bsp / direct")


@pytest.mark.parametrize("case", LIKE_DIRECT)
def test_synchronous_servers_give_the_bits_of_direct(case: str) -> None:
    kind, layer, unused, strategy = LIKE_DIRECT[case]
    assert spawn(3, learn, kind, layer, unused, WEFT_STRATEGY=strategy) == direct(kind, layer, unused)


@pytest.mark.parametrize(
    "strategy",
    [
        "bsp / parameter_server(servers=2) / error_feedback(topk(ratio=0.3))",
    ],
)
def test_a_run_with_servers_that_was_killed_goes_on_as_if_it_had_not_been(scratch: Path, strategy: str) -> None:
    script(scratch, SGD, layer="nn.BatchNorm1d(8), nn.Dropout(0.1), ")
    expected = trained(scratch, strategy, "whole", "--save-every", "0")
    assert all(event["exposed_s"] > 0 for event in events(scratch / "whole"))
    script(
        scratch,
        SGD,
        layer="nn.BatchNorm1d(8), nn.Dropout(0.1), ",
        between="[os.kill(os.getpid(), 9) "
        "for _ in [0] if run.step == 8 and run.rank == 2 and 'WEFT_RESUME' not in os.environ]",
    )
    line = ["train", "job.py", "-n", 3, "--strategy", strategy, "--out", "out", "--save-every", 3]
    done = command(*line, cwd=scratch)
    assert done.returncode == 1, done.stderr + done.stdout
    assert "SIGKILL" in done.stderr
    done = command("train", "--resume", "out", cwd=scratch)
    assert done.returncode == 0, done.stderr + done.stdout
    words = {line.split("] ", 1)[1] for line in done.stdout.splitlines() if "0x" in line}
    assert ([event["loss"] for event in events(scratch / "out")], words) == expected
    assert gone(scratch)


@pytest.mark.parametrize(
    "strategy",
    [
        "bsp / parameter_server(servers=2) / priority",
        "essp / parameter_server",
        "downpour(push=7, fetch=9) / asp / parameter_server",
    ],
)
def test_asked_to_leave_a_run_with_servers_saves_itself(scratch: Path, strategy: str) -> None:
    script(scratch, sleep=0.3)
    line = [*WEFT, "train", "job.py", "-n", "2", "--strategy", strategy, "--out", "out", "--save-every", "500"]
    run = subprocess.Popen(line, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    _under_way(scratch / "out", 2)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 143 and "after it was saved" in said, said
    done = command("train", "--resume", "out", cwd=scratch)
    assert done.returncode == 0, done.stderr + done.stdout
    assert events(scratch / "out")[-1]["step"] == 12
    assert gone(scratch)


@pytest.mark.parametrize(
    "strategy",
    [
        "value_bound(delta=0.5) / parameter_server",
        "delay_compensated(asp) / colocated / error_feedback(topk(ratio=0.3))",
        "negative_momentum(asp) / hierarchical(groups=2) / wfbp",
        "delay_compensated(essp(slack=2)) / parameter_server(servers=2) / priority",
        "staleness_weighted(essp(slack=1)) / colocated / sequential",
    ],
)
def test_ways_of_not_waiting_learn(strategy: str) -> None:
    """Those that no preset has."""
    for losses, _ in spawn(3, learn, "plain", "", False, WEFT_STRATEGY=strategy):
        assert losses[-1] < 0.95 * losses[0]


def test_eager_servers_leave_worker_0_its_buffers() -> None:
    """Whatever is sent to it, and however late: it has counted all its batches, and nobody has counted more."""
    found = spawn(3, learn, "plain", "norm", False, WEFT_STRATEGY="essp(slack=3) / parameter_server(servers=2)")
    counted = [weights[3 + 32 + 8 + 4 * 8] for _, weights in found]
    assert counted[0] == 9 and all(0 <= each <= 9 for each in counted)


def one_step(kind: str) -> list[float]:
    """What a run of one step leaves, with its end or with a look at the optimizer's state."""
    run = weft.init(steps=1)
    model: Any = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = run.distribute(model, optimizer)
    for x in run.shard([torch.ones(1, 2)]):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if kind == "look":
        optimizer.state_dict()
    else:
        run.close()
    values: list[float] = torch.cat([model.weight.flatten(), model.bias]).tolist()
    run.close()
    return values


@pytest.mark.parametrize("kind", ["look", "close"])
def test_a_checkpoint_and_the_end_of_an_eager_run_have_its_own_updates(kind: str) -> None:
    assert spawn(1, one_step, kind, WEFT_STRATEGY="essp(slack=5) / parameter_server") == [[0.5, 0.5, 0.5]]


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
        "a gradient was touched that has gone to the servers"
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
    "nn.utils.clip_grad_norm_(model.parameters(), 1.0)": "a gradient was touched that has gone to the servers",
    "optimizer.load_state_dict(optimizer.state_dict())": "the servers have the optimizer's state",
    "(model(x).sum() + model.spare.sum()).backward()": "backward ran twice before step()",
}


@pytest.mark.parametrize("strategy", ["bsp / parameter_server", "asp / parameter_server / sequential"])
def test_gradients_of_the_step_before_are_not_added_to(strategy: str) -> None:
    with pytest.raises(ChildError, match=r"optimizer\.zero_grad\(\) in\s+every step"):
        spawn(1, misuse, "optimizer.zero_grad = lambda: 0", WEFT_STRATEGY=strategy)


def test_a_closure_is_refused_by_one_worker_with_servers_too() -> None:
    with pytest.raises(ChildError, match="call backward first"):
        spawn(1, misuse, "optimizer.step(lambda: 1.0)", WEFT_STRATEGY="bsp / parameter_server")


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
    with pytest.raises(ChildError, match="a gradient was touched that has gone to the servers"):
        spawn(2, unusual, "two optimizers", WEFT_STRATEGY="bsp / colocated / priority")


def test_a_parameter_that_leaves_shared_memory_is_refused() -> None:
    with pytest.raises(ChildError, match=r"0\.bias was given other memory"):
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
def test_what_servers_cannot_do_is_said(scratch: Path, case: str) -> None:
    args, how, sentence = REFUSED[case]
    script(scratch, **how)  # type: ignore[arg-type]
    done = command("train", "job.py", "-n", 2, "--strategy", "bsp / parameter_server", *args, cwd=scratch)
    assert done.returncode == 2
    assert sentence in done.stdout + done.stderr
    assert gone(scratch)


@pytest.mark.parametrize(
    ("who", "strategy"),
    [
        ("server", "asp / parameter_server"),
        ("worker", "bsp / parameter_server"),
        ("worker", "asp / hierarchical(groups=1)"),
    ],
)
def test_a_killed_process_ends_the_run_with_one_message(scratch: Path, who: str, strategy: str) -> None:
    script(scratch, sleep=0.5)
    line = [*WEFT, "train", "job.py", "-n", "2", "--strategy", strategy, "--out", "out"]
    run = subprocess.Popen(
        [*line, "--save-every", "1"], cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    _under_way(scratch / "out", 2)
    while not list((scratch / "out/checkpoints").glob("step-*")):
        time.sleep(0.1)
    victim = next(pid for pid, server in children(run.pid) if server == (who == "server"))
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert time.monotonic() - killed < 30
    assert "was ended by SIGKILL; the others were stopped" in said, said
    done = command("train", "--resume", "out", cwd=scratch)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "the others continue" not in done.stderr + done.stdout
    assert gone(scratch)


def test_a_worker_killed_where_nobody_waits_is_named_and_the_others_go_on(scratch: Path) -> None:
    script(scratch, sleep=0.3)
    line = [*WEFT, "train", "job.py", "-n", "3", "--strategy", "ssp(slack=3) / parameter_server", "--out", "out"]
    run = subprocess.Popen(line, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    _under_way(scratch / "out", 3)
    victim = next(pid for pid, _ in children(run.pid) if b"\0RANK=2\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(victim, signal.SIGKILL)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 0, said
    assert "worker 2 was lost" in said and "the others continue" in said, said
    assert events(scratch / "out")[-1]["step"] == 12
    assert gone(scratch)


def _under_way(out: Path, workers: int) -> None:
    """Wait until every worker has taken a step."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        files = list(out.glob("events-*.jsonl"))
        if len(files) == workers and all(file.stat().st_size for file in files):
            return
        time.sleep(0.1)
    raise AssertionError("the run does not get under way")


def children(parent: int) -> list[tuple[int, bool]]:
    """A launcher's processes, and whether each is a server."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                found.append((int(folder.name), b"WEFT_SERVER=" in (folder / "environ").read_bytes()))
        except (OSError, ValueError):
            continue
    return found
