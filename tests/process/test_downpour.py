"""Downpour SGD with real servers: what one process computes by the paper's pseudo-code, and nothing lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.process.commands import Command, gone
from tests.process.harness import ChildError, spawn
from tests.process.served_job import SGD, script
from tests.process.served_job import learn as learn_in_step
from tests.process.test_presets import learn_by_preset
from weft.runtime.record.run_folder import events, summary

STEPS = 11
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}
Learned = tuple[list[float], list[float], list[float]]
"""Losses of each step, the model after the last one, and the servers' in the end."""


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()


def batches() -> list[Tensor]:
    rng = torch.Generator().manual_seed(3)
    return [torch.randn(5, 4, generator=rng, dtype=torch.float64) for _ in range(STEPS)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :2].sin()).square().mean()


def weights(model: nn.Module) -> list[float]:
    return [value for each in model.state_dict().values() for value in each.double().flatten().tolist()]


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    """What a step is taken with differs from one to the next, and is nothing after the last."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)


def learn(kind: str) -> Learned:
    """An ordinary loop, with clipping."""
    run = weft.init(steps=STEPS)
    model: Any = build(0 if run.is_main else 1)  # servers build another model: worker 0's counts
    optimizer: Any = OPTIMIZERS[kind](model.parameters())
    model, optimizer, scheduler = run.distribute(model, optimizer, schedule(optimizer))
    losses = []
    for x in run.shard(batches()):
        loss = loss_of(model, x)
        loss.backward()
        run.clip(0.2)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    mine = weights(model)
    run.close()
    return losses, mine, weights(model)


def simulated(kind: str, push: int, fetch: int, saves: int = 0) -> Learned:
    """The pseudo-code of Dean et al. 2012 for one worker and one server, without either."""
    model, copy = build(0), build(0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = schedule(optimizer)
    accrued = [torch.zeros_like(p) for p in copy.parameters()]
    lr = 0.0

    def send() -> None:
        if any(grad.any() for grad in accrued):
            optimizer.param_groups[0]["lr"], after = lr, optimizer.param_groups[0]["lr"]
            for p, grad in zip(model.parameters(), accrued, strict=True):
                p.grad = grad.clone()
                grad.zero_()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = after

    @torch.no_grad()
    def take() -> None:
        for p, q in zip(copy.parameters(), model.parameters(), strict=True):
            p.copy_(q)

    losses = []
    for step, x in enumerate(batches(), 1):
        loss = loss_of(copy, x)
        copy.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(copy.parameters(), 0.2)
        lr = optimizer.param_groups[0]["lr"]
        for p, grad in zip(copy.parameters(), accrued, strict=True):
            assert p.grad is not None
            grad += p.grad
            p.data -= lr * p.grad
        if step % push == 0:
            send()
        if step % fetch == 0:
            take()
        optimizer._opt_called = True  # type: ignore[attr-defined]
        scheduler.step()
        losses.append(loss.item())
        mine = weights(copy)
        if saves and step % saves == 0:
            send()
            take()
    send()
    take()
    return losses, mine, weights(copy)


CASES = {
    "neither divides the other": ("momentum", 3, 2, "parameter_server(servers=2)"),
    "adagrad": ("adagrad", 3, 2, "parameter_server(servers=2)"),
    "several pushes to a fetch": ("momentum", 1, 4, "colocated / wfbp"),
    "several fetches to a push": ("adagrad", 4, 1, "parameter_server / sequential"),
    "neither before the end": ("momentum", 20, 30, "parameter_server"),
    "whoever touches it waits": ("momentum", 2, 2, "parameter_server(servers=2) / priority"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_worker_computes_what_the_pseudo_code_says(case: str) -> None:
    kind, push, fetch, how = CASES[case]
    (found,) = spawn(1, learn, kind, WEFT_STRATEGY=f"downpour(push={push}, fetch={fetch}) / asp / {how}")
    for mine, theirs in zip(found, simulated(kind, push, fetch), strict=True):
        assert mine == pytest.approx(theirs, rel=0, abs=1e-10)


def test_a_save_pushes_and_fetches(tmp_path: Path) -> None:
    strategy = "downpour(push=3, fetch=5) / asp / parameter_server(servers=2)"
    (found,) = spawn(1, learn, "momentum", WEFT_STRATEGY=strategy, WEFT_OUT=str(tmp_path), WEFT_SAVE_EVERY="4")
    expected = simulated("momentum", 3, 5, saves=4)
    assert found[0] == pytest.approx(expected[0], rel=0, abs=1e-10)
    assert found[2] == pytest.approx(expected[2], rel=0, abs=1e-10)


@pytest.mark.parametrize(("kind", "layer", "unused"), [("nesterov", "norm", False), ("adam", "", True)])
def test_with_a_push_and_a_fetch_in_every_step_it_is_gradient(kind: str, layer: str, unused: bool) -> None:
    alone = spawn(1, learn_in_step, kind, layer, unused, WEFT_STRATEGY="bsp / direct")
    for how in ("asp / parameter_server(servers=2)", "downpour / asp / parameter_server(servers=2)"):
        assert spawn(1, learn_in_step, kind, layer, unused, WEFT_STRATEGY=how) == alone


@pytest.mark.parametrize(
    "strategy",
    [
        "downpour(push=4, fetch=3) / asp / parameter_server(servers=2)",
        "downpour(push=2, fetch=5) / staleness_weighted(softsync) / colocated / error_feedback(topk(ratio=0.3))",
        "downpour(push=3) / ssp(slack=inf) / parameter_server / priority",
    ],
)
def test_workers_that_go_on_by_themselves_learn(strategy: str) -> None:
    for before, after, _ in spawn(2, learn_by_preset, WEFT_STRATEGY=strategy):
        assert after < 0.9 * before


def add_up(lengths: tuple[int, int], size: int) -> tuple[list[float], list[float]]:
    """Gradients that depend on no model: what they come to, and what became of the model; a few values of each."""
    run = weft.init()
    model: Any = nn.Linear(size, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = run.distribute(model, optimizer)
    rng = torch.Generator().manual_seed(run.rank)
    mine = [torch.rand(2, size, generator=rng, dtype=torch.float64) for _ in range(lengths[run.rank])]
    for x in run.shard(mine, own=True):
        if run.step == 2:  # what no step follows does not count
            model(x).sum().backward()
            optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    given, became = -0.5 * torch.cat(mine).sum(0) / 2, model.weight.detach().flatten()
    return given[:: size // 3].tolist(), became[:: size // 3].tolist()


@pytest.mark.parametrize(
    ("how", "lengths", "size"),
    [("push=3, fetch=2", (7, 7), 3), ("push=3, fetch=2", (4, 8), 3), ("fetch=50", (20, 20), 300_000)],
    ids=["even", "uneven", "pushes behind pushes"],
)
def test_every_gradient_counts_once(how: str, lengths: tuple[int, int], size: int) -> None:
    """Whoever is last has fetched what all have pushed; one whose batches have run out adds nothing."""
    found = spawn(2, add_up, lengths, size, WEFT_STRATEGY=f"downpour({how}) / asp / parameter_server")
    expected = [sum(each) for each in zip(*(given for given, _ in found), strict=True)]
    last = [min(each) for each in zip(*(model for _, model in found), strict=True)]
    assert last == pytest.approx(expected, rel=0, abs=1e-10)


def test_a_run_says_how_late_its_pushes_were_and_what_they_cost(tmp_path: Path) -> None:
    """Lateness counts from the model last fetched: three pushes to a fetch, and three with the one at the end."""
    strategy = "downpour(push=2, fetch=6) / asp / parameter_server"
    spawn(1, learn, "momentum", WEFT_STRATEGY=strategy, WEFT_OUT=str(tmp_path), WEFT_SAVE_EVERY="0")
    found = summary(tmp_path)
    (server,) = found["servers"]
    assert server["updates"] == 6
    counts = {late: count for _, late, count in server["staleness"]}
    assert set(counts) == {0, 1, 2} and len(set(counts.values())) == 1
    assert found["wire_bytes_worker"] == sum(p.nbytes for p in build(0).parameters()) / 2


@pytest.mark.parametrize("strategy", ["downpour(push=4, fetch=5) / asp / parameter_server(servers=2) / int8"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(scratch: Path, strategy: str, weft: Command) -> None:
    layer = "nn.BatchNorm1d(8), nn.Dropout(0.1), "
    line = ["train", "job.py", "-n", 1, "--strategy", strategy, "--save-every", 3, "--out"]
    script(scratch, SGD, layer=layer)
    done = weft(*line, "whole", cwd=scratch)
    assert done.returncode == 0, done.stderr + done.stdout
    kill = "[os.kill(os.getpid(), 9) for _ in [0] if run.step == 8 and 'WEFT_RESUME' not in os.environ]"
    script(scratch, SGD, layer=layer, between=kill)
    assert weft(*line, "out", cwd=scratch).returncode == 1
    again = weft("train", "--resume", "out", cwd=scratch)
    assert again.returncode == 0, again.stderr + again.stdout
    last = [[line for line in each.stdout.splitlines() if "0x" in line] for each in (done, again)]
    assert last[0] == last[1] and last[0]
    assert [event["loss"] for event in events(scratch / "out")] == [
        event["loss"] for event in events(scratch / "whole")
    ]
    assert gone(scratch)


def misuse(what: str) -> None:
    """A loop that does something between backward and step, and leaves in order all the same."""
    run = weft.init(steps=5)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.distribute(model, optimizer)
    fine = True
    try:
        for x in run.shard([torch.ones(2, 4)] * 8):
            with run.accumulate():
                model(x).square().mean().backward()
            if what != "accumulate alone" or run.step < 2:
                model(x).square().mean().backward()
            if run.step == 2 and what != "accumulate alone":
                exec(what)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        run.close()
        fine = all(bool(p.isfinite().all()) for p in model.parameters())
        assert fine, "what was refused has reached the servers"


MISUSED = {
    "model[0].bias.grad[1] = torch.nan": "The gradient of 0.bias is NaN or infinite at step 3",
    "model[0].bias.grad = None": "0.bias had no gradient at step 3",
    "model[1].weight.detach().mul_(2); model(x).sum().backward()": "backward ran twice before step()",
    "model[1].weight.detach().mul_(2); optimizer.step()": "1.weight was changed outside of the optimizer",
    "optimizer.load_state_dict(optimizer.state_dict())": "the servers have the optimizer's state",
    "accumulate alone": "leave the last backward outside of it",
}


@pytest.mark.parametrize("what", MISUSED)
def test_what_would_train_wrong_is_refused(what: str) -> None:
    with pytest.raises(ChildError) as found:
        spawn(1, misuse, what, WEFT_STRATEGY="downpour(push=4, fetch=4) / asp / parameter_server")
    assert found.value.kind == "LoopError" and MISUSED[what] in " ".join(str(found.value).split())
