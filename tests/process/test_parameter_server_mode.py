"""`weft train` with parameter servers: the same losses as without where that is promised."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.process.commands import WEFT, Command, gone
from tests.process.commands import weft as command
from tests.process.harness import spawn
from tests.process.served_job import SGD, learn, script
from weft.runtime.record.run_folder import events


def trained(folder: Path, strategy: str, out: str, *args: str) -> tuple[list[float], set[str]]:
    """Losses, and what the workers say of their last models."""
    done = command("train", "job.py", "-n", 3, "--strategy", strategy, "--out", out, *args, cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    words = {line.split("] ", 1)[1] for line in done.stdout.splitlines() if "0x" in line}
    return [event["loss"] for event in events(folder / out)], words


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
def test_a_run_with_servers_that_was_killed_goes_on_as_if_it_had_not_been(
    scratch: Path, strategy: str, weft: Command
) -> None:
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
    done = weft(*line, cwd=scratch)
    assert done.returncode == 1, done.stderr + done.stdout
    assert "SIGKILL" in done.stderr
    done = weft("train", "--resume", "out", cwd=scratch)
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
def test_asked_to_leave_a_run_with_servers_saves_itself(scratch: Path, strategy: str, weft: Command) -> None:
    script(scratch, sleep=0.3)
    line = [*WEFT, "train", "job.py", "-n", "2", "--strategy", strategy, "--out", "out", "--save-every", "500"]
    run = subprocess.Popen(line, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    _under_way(scratch / "out", 2)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 143 and "; saved in out/checkpoints/" in said, said
    done = weft("train", "--resume", "out", cwd=scratch)
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


@pytest.mark.parametrize(
    ("who", "strategy"),
    [
        ("server", "asp / parameter_server"),
        ("worker", "bsp / parameter_server"),
        ("worker", "asp / hierarchical(groups=1)"),
    ],
)
def test_a_killed_process_ends_the_run_with_one_message(scratch: Path, who: str, strategy: str, weft: Command) -> None:
    script(scratch, sleep=0.5)
    line = [*WEFT, "train", "job.py", "-n", "2", "--strategy", strategy, "--out", "out"]
    run = subprocess.Popen(
        [*line, "--save-every", "1"], cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    _under_way(scratch / "out", 2)
    while not list((scratch / "out/checkpoints").glob("step-*")):
        time.sleep(0.1)
    victim = children(run.pid)[f"weft-{who}-0"]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert time.monotonic() - killed < 30
    assert "was ended by SIGKILL; the others were stopped" in said, said
    done = weft("train", "--resume", "out", cwd=scratch)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "the others continue" not in done.stderr + done.stdout
    assert gone(scratch)


def test_a_worker_killed_where_nobody_waits_is_named_and_the_others_go_on(scratch: Path) -> None:
    script(scratch, sleep=0.3)
    line = [*WEFT, "train", "job.py", "-n", "3", "--strategy", "ssp(slack=3) / parameter_server", "--out", "out"]
    run = subprocess.Popen(line, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    _under_way(scratch / "out", 3)
    victim = children(run.pid)["weft-worker-2"]
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


def children(parent: int) -> dict[str, int]:
    """A launcher's processes by their names."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                found[(folder / "comm").read_text().strip()] = int(folder.name)
        except (OSError, ValueError):
            continue
    return found
