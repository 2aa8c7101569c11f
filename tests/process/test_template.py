"""Processes that are forked from a template: the bits of new ones, and nothing that outlives the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.commands import WEFT, Command, Job, children_of, gone, losses, until
from weft.lab.child import MODULE
from weft.runtime.launch import start, template

TRAINS = """
import atexit, random, sys
import numpy, torch, weft
from torch import nn

before = f"{numpy.random.random()} {random.random()}"
run = weft.init(steps=6)
noise = f"{numpy.random.random()} {random.random()}"
model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = run.distribute(model, optimizer)
x = torch.randn(256, 6, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=8, shuffle=True, num_workers=1)
for (x,) in run.shard(loader):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=loss)
sys.left_open = open(f"{run.folder}-{run.rank}", "w")
sys.left_open.write("flushed")
atexit.register(lambda: sys.stdout.write("said at exit | 6 steps\\n"))
said = f"said {before} | {noise} {torch.get_num_threads()} {sys.argv} {__name__} {sys.path[0]}"
sys.stdout.write(said + "\\n")
"""


BROKEN = """
import sys

if "weft.runtime.launch.template" in sys.orig_argv:
    sys.exit("broken on purpose")
"""


@pytest.mark.parametrize("strategy", ["bsp / direct", "ssp(slack=2) / parameter_server"])
def test_forked_processes_have_the_bits_of_new_ones(scratch: Path, job: Job, weft: Command, strategy: str) -> None:
    path = job(TRAINS)
    said = []
    for fork in ("1", "0"):
        words = ("train", path, "-n", 2, "--out", f"run{fork}", "--strategy", strategy)
        done = weft(*words, "--", "--flag", cwd=scratch, WEFT_FORK=fork)
        assert done.returncode == 0, done.stderr
        lines = sorted(line.partition("said ")[::2] for line in done.stdout.splitlines() if "said " in line)
        before = [text.partition(" | ")[0] for _, text in lines]
        assert len(set(before)) == 3  # before init, every process draws numbers of its own
        said.append([(rank, text.partition(" | ")[2]) for rank, text in lines])
        assert [(scratch / f"run{fork}-{rank}").read_text() for rank in range(2)] == ["flushed"] * 2
    assert said[0] == said[1] and len(said[0]) == 4
    if strategy.startswith("bsp"):
        assert losses(scratch / "run1") == losses(scratch / "run0")
        first, second = (sorted((scratch / f"run{f}" / "checkpoints" / "step-00000006").iterdir()) for f in "10")
        assert [file.read_bytes() for file in first if file.name.startswith("model")] == [
            file.read_bytes() for file in second if file.name.startswith("model")
        ]


def test_processes_of_a_run_are_forked(scratch: Path, job: Job) -> None:
    path = job(TRAINS.replace("steps=6", "steps=100000").replace("run.shard(loader)", "run.shard(loader, epochs=None)"))
    launcher = subprocess.Popen([*WEFT, "train", str(path), "-n", "2"], cwd=scratch, stderr=subprocess.PIPE)
    try:
        until(lambda: [1 for file in scratch.glob("runs/*/events-1.jsonl") if file.stat().st_size])
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in children_of(scratch)]
        assert not [line for line in lines if "-m\0weft.runtime.launch.child" in line]
        assert [line for line in lines if "-m\0weft.runtime.launch.template" in line]
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.communicate()
    assert gone(scratch)


def test_a_template_that_cannot_import_says_why(scratch: Path, job: Job, weft: Command) -> None:
    (scratch / "broken").mkdir()
    (scratch / "broken" / "sitecustomize.py").write_text(BROKEN)
    path = [str(scratch / "broken"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = weft("train", job(TRAINS), "-n", 2, cwd=scratch, PYTHONPATH=os.pathsep.join(path))
    assert done.returncode == 2 and done.stderr.rstrip().endswith(
        "weft: no process could be started: SystemExit: broken on purpose; see `weft doctor`, or set WEFT_FORK=0"
    )


def test_a_template_runs_nothing(tmp_path: Path) -> None:
    """No thread, no CUDA and no OpenMP team, which a fork would break. OpenBLAS ends its own threads before a fork."""
    code = f"""
import importlib, json, os, sys, threading
for name in {(*template.PRELOADED, MODULE)!r}:
    importlib.import_module(name)
import torch
print(json.dumps([len(os.listdir("/proc/self/task")), torch.cuda.is_initialized()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"}, check=True
    )
    assert json.loads(done.stdout) == [1, False]


def test_new_processes_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_FORK", "0")
    assert not start.can_fork()
    monkeypatch.delenv("WEFT_FORK")
    assert start.can_fork() == (sys.platform == "linux")


def test_another_value_is_refused(scratch: Path, job: Job, weft: Command) -> None:
    done = weft("train", job(TRAINS), "-n", 2, cwd=scratch, WEFT_FORK="yes")
    assert done.returncode == 2 and "WEFT_FORK" in done.stderr and done.stderr.count("\n") == 1
