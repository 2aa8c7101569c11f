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
optimizer = torch.optim.{optimizer}
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
model, optimizer, scheduler = run.distribute(model, optimizer, scheduler)
data = [torch.full((3, 4), 0.1 * float(i)) for i in range(24)]
for x in run.shard(data, epochs=None):
    time.sleep({sleep})
    with run.accumulate():
        (model(x) - 2).square().mean().backward()
    loss = (model(x).sin() - 1).square().mean()
    loss.backward()
    {between}
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    run.log(loss=loss)
print(" ".join(p.sum().item().hex() for p in model.parameters()))
"""
ADAM = "Adam(model.parameters(), lr=0.01)"
SGD = "SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)"


def script(folder: Path, optimizer: str = ADAM, between: str = "pass", layer: str = "", sleep: float = 0.0) -> None:
    (folder / "job.py").write_text(JOB.format(optimizer=optimizer, between=between, layer=layer, sleep=sleep))


def trained(folder: Path, strategy: str, out: str, *args: str) -> tuple[list[float], set[str]]:
    """Losses, and what the workers say of their last models."""
    done = command("train", "job.py", "-n", 3, "--strategy", strategy, "--out", out, *args, cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    words = {line.split("] ", 1)[1] for line in done.stdout.splitlines() if "0x" in line}
    return [event["loss"] for event in events(folder / out)], words


@pytest.mark.parametrize(
    ("optimizer", "strategies"),
    [
        (ADAM, ["bsp / parameter_server", "bsp / parameter_server(servers=3)"]),
        (SGD, ["ssp(slack=0) / parameter_server(servers=2)"]),
    ],
    ids=["adam", "nesterov"],
)
def test_synchronous_servers_give_the_bits_of_direct(scratch: Path, optimizer: str, strategies: list[str]) -> None:
    script(scratch, optimizer)
    expected = trained(scratch, "bsp / direct", "direct", "--save-every", "0")
    for number, strategy in enumerate(strategies):
        assert trained(scratch, strategy, f"out{number}") == expected
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
    "saving": (["--save-every", "5"], {}, "cannot be saved yet"),
    "processes": (["--processes", "1"], {}, "a process for each worker"),
    "hosts": (["--hosts", "2"], {}, "no emulated hosts yet"),
    "batchnorm": ([], {"layer": "nn.BatchNorm1d(8), "}, "the model has buffers"),
    "clip": ([], {"between": "run.clip(1.0)"}, "leave it out there"),
    "clipped by hand": (
        [],
        {"between": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"},
        "a gradient was touched that has gone to the servers",
    ),
    "scaled by hand": ([], {"between": "model[0].weight.grad.mul_(2)"}, "a gradient was touched"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_servers_cannot_do_is_said(scratch: Path, case: str) -> None:
    args, how, sentence = REFUSED[case]
    script(scratch, **how)  # type: ignore[arg-type]
    done = command("train", "job.py", "-n", 2, "--strategy", "bsp / parameter_server", *args, cwd=scratch)
    assert done.returncode != 0
    assert sentence in done.stdout + done.stderr
    assert gone(scratch)


@pytest.mark.parametrize("who", ["server", "worker"])
def test_a_killed_process_ends_the_run_with_one_message(scratch: Path, who: str) -> None:
    script(scratch, sleep=0.5)
    line = [*WEFT, "train", "job.py", "-n", "2", "--strategy", "bsp / parameter_server", "--out", "out"]
    run = subprocess.Popen(line, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    victim = None
    until = time.monotonic() + 60
    while victim is None and time.monotonic() < until:
        time.sleep(0.1)
        if len(list((scratch / "out").glob("events-*.jsonl"))) == 2:
            victim = next((pid for pid, server in children(run.pid) if server == (who == "server")), None)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert time.monotonic() - killed < 30
    assert "was ended by SIGKILL; the others were stopped" in said, said
    assert gone(scratch)


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
