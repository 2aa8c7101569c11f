"""`weft train` with parameter servers: the same losses as without where that is promised, and refusals elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.process.test_launch import WEFT, gone, scratch
from tests.process.test_launch import weft as command
from weft.runtime.folder import events

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


LIKE_DIRECT = {
    "adam": ({}, ["bsp / parameter_server", "bsp / parameter_server(servers=3) / priority"]),
    "nesterov": ({"optimizer": SGD}, ["ssp(slack=0) / parameter_server(servers=2)", "bsp / colocated / sequential"]),
    "batchnorm": ({"layer": "nn.BatchNorm1d(8), "}, ["bsp / colocated / priority(least=1B)"]),
    "unused": (
        {"unused": True, "spare": "(model.spare.sum() if (run.rank + run.step) % 4 == 0 else 0)"},
        ["bsp / parameter_server(servers=2)"],
    ),
    "adafactor": ({"optimizer": "Adafactor(model.parameters(), lr=0.05)"}, ["bsp / parameter_server(servers=2)"]),
}


@pytest.mark.parametrize("case", LIKE_DIRECT)
def test_synchronous_servers_give_the_bits_of_direct(scratch: Path, case: str) -> None:
    how, strategies = LIKE_DIRECT[case]
    script(scratch, **how)  # type: ignore[arg-type]
    expected = trained(scratch, "bsp / direct", "direct", "--save-every", "0")
    for number, strategy in enumerate(strategies):
        assert trained(scratch, strategy, f"out{number}", "--save-every", "0") == expected
    assert gone(scratch)


@pytest.mark.parametrize(
    "strategy",
    [
        "bsp / parameter_server(servers=2)",
        "bsp / colocated / priority",
        "bsp / parameter_server / error_feedback(topk(ratio=0.3))",
    ],
)
def test_a_run_with_servers_that_was_killed_goes_on_as_if_it_had_not_been(scratch: Path, strategy: str) -> None:
    script(scratch, SGD, layer="nn.BatchNorm1d(8), nn.Dropout(0.1), ")
    expected = trained(scratch, strategy, "whole", "--save-every", "0")
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


@pytest.mark.parametrize("strategy", ["bsp / parameter_server(servers=2) / priority", "asp / parameter_server"])
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
        "asp / parameter_server",
        "ssp(slack=2) / parameter_server(servers=2) / int8",
        "asp / parameter_server / error_feedback(significant)",
        "backup(spares=1) / parameter_server",
        "softsync(n=3) / parameter_server",
        "value_bound(delta=0.5) / parameter_server",
        "staleness_weighted(asp) / parameter_server / error_feedback(topk(ratio=0.3))",
        "delay_compensated(asp) / parameter_server",
        "negative_momentum(asp) / parameter_server",
    ],
)
def test_ways_of_not_waiting_learn(scratch: Path, strategy: str) -> None:
    script(scratch, "SGD(model.parameters(), lr=0.02, momentum=0.5)")
    losses, _ = trained(scratch, strategy, "out")
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]


REFUSED = {
    "processes": (["--processes", "1"], {}, "a process for each worker"),
    "servers without work": (["--strategy", "bsp / parameter_server(servers=9)"], {}, "only 5 of them"),
    "optimizer": ([], {"optimizer": "LBFGS(model.parameters())"}, "may look at several parameters at once"),
    "unused": ([], {"spare": "0"}, "spare had no gradient at step 1"),
    "rates": ([], {"between": "optimizer.param_groups[0]['lr'] *= 2"}, "have changed between backward() and step()"),
    "changed": (
        [],
        {"between": "model[0].weight.data.copy_(model[0].weight); model[0].bias.detach().mul_(2)"},
        "0.bias was changed beside the optimizer",
    ),
    "gradients kept": (
        ["--strategy", "bsp / parameter_server / priority"],
        {"between": "optimizer.zero_grad = lambda: 0"},
        "call optimizer.zero_grad() in every step",
    ),
    "clip": ([], {"between": "run.clip(1.0)"}, "leave it out there"),
    "clipped by hand": (
        [],
        {"between": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"},
        "a gradient was touched that has gone to the servers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_servers_cannot_do_is_said(scratch: Path, case: str) -> None:
    args, how, sentence = REFUSED[case]
    script(scratch, **how)  # type: ignore[arg-type]
    done = command("train", "job.py", "-n", 2, "--strategy", "bsp / parameter_server", *args, cwd=scratch)
    assert done.returncode != 0
    assert sentence in done.stdout + done.stderr
    assert gone(scratch)


@pytest.mark.parametrize(("who", "strategy"), [("server", "asp"), ("worker", "bsp")])
def test_a_killed_process_ends_the_run_with_one_message(scratch: Path, who: str, strategy: str) -> None:
    script(scratch, sleep=0.5)
    line = [*WEFT, "train", "job.py", "-n", "2", "--strategy", f"{strategy} / parameter_server", "--out", "out"]
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
    assert "worker 2 went away" in said and "the others go on" in said, said
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
