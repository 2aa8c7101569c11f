"""What a command imports before it starts anything, and what it leaves behind where it starts nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.commands import WEFT, Command, Job, children_of, until
from weft.cli import COMMANDS
from weft.environment import LocalLauncher
from weft.runtime.launch.start import at_start, starting, template

HELPED = [[name, "--help"] for name in (*COMMANDS, "key")]
ANSWERED = [
    [],
    ["--version"],
    ["--help"],
    ["check", "bsp / ring / error_feedback(topk)"],
    ["check", "bsp / direct / powersgd / mg_wfbp"],
    ["check", "asp / parameter_server / int8 / priority"],
    ["answers"],
    ["systems"],
]
REFUSED = [
    ["check", "rnig"],
    ["check", "asp / ring"],
    ["answers", "colour"],
    ["systems", "hrovod"],
    ["train"],
    ["train", "txet"],
    ["train", "text", "--stpes", "1"],
    ["train", "text", "--strategy", "rnig"],
    ["train", "text", "--strategy", "asp / ring"],
    ["train", "text", "-n", "0"],
    ["train", "text", "-n", "2", "--slow", "1=4x"],
    ["train", "--resume", "nowhere"],
    ["compare", "text", "rnig"],
    ["compare", "text", "asp / ring"],
    ["compare", "text", "--peers", "dpd"],
    ["export", "nowhere", "--to", "csv"],
    ["lab", "up", "--link", "1"],
    ["join", "nowhere", "--key-file", "none"],
    ["doctor", "--all"],
]
IMPORTED = """
import importlib, json, os, sys
from weft import cli

for name in cli.COMMANDS:  # once for all forks
    importlib.import_module(f"weft.cli.{name}")
for words in json.loads(sys.argv[1]):
    if os.fork():
        os.wait()
        continue
    sys.argv[1:] = words
    status = 0
    try:
        cli.main()
    except SystemExit as leaving:
        status = leaving.code or 0
    found = [words, status, sorted({"torch", "numpy"} & set(sys.modules))]
    with open("found", "a") as file:
        file.write(json.dumps(found) + "\\n")
    os._exit(0)
"""
SLEEPS = """
import sys, time

if "weft.runtime.launch.template" in sys.orig_argv:
    time.sleep(600)
"""
TRAINS = """
import torch, weft

run = weft.init(steps=1)
model = torch.nn.Linear(2, 1)
model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for x in run.shard([torch.ones(1, 2)]):
    model(x).sum().backward()
    optimizer.step()
"""
SAYS = """
import os, sys, torch

def main():
    print(sys.argv[1:], torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
"""


def test_a_command_that_starts_no_run_imports_no_torch(scratch: Path) -> None:
    words = [*HELPED, *ANSWERED, ["key", "key"], *REFUSED]
    command = [sys.executable, "-c", IMPORTED, json.dumps(words)]
    subprocess.run(command, cwd=scratch, capture_output=True, check=True, timeout=120)
    found = [json.loads(line) for line in (scratch / "found").read_text().splitlines()]
    assert found == [[each, 2 if each in REFUSED else 0, []] for each in words]


def with_slow_template(folder: Path) -> dict[str, str]:
    """An environment in which a template imports nothing for minutes."""
    (folder / "slow").mkdir()
    (folder / "slow" / "sitecustomize.py").write_text(SLEEPS)
    path = [str(folder / "slow"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def test_a_refused_command_does_not_wait_for_its_template(scratch: Path) -> None:
    command = [*WEFT, "train", "text", "-n", "2", "--strategy", "rnig"]
    env = with_slow_template(scratch)
    done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "'rnig'" in done.stderr
    assert not children_of(scratch)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_while_it_starts_says_so(
    scratch: Path, job: Job, weft: Command, number: signal.Signals
) -> None:
    run, words = scratch / "run", ["train", str(job(TRAINS)), "--out", "run"]

    def stopped(*words: str) -> str:
        launcher = subprocess.Popen([*WEFT, *words], cwd=scratch, env=env, stderr=subprocess.PIPE, text=True)
        until(lambda: list(scratch.glob("tmp/weft-*/lock")))
        launcher.send_signal(number)
        _, said = launcher.communicate(timeout=60)
        assert launcher.returncode == 128 + number
        return said

    env = with_slow_template(scratch)
    assert stopped(*words) == "weft: stopped; nothing was saved\n" and not run.exists()
    assert weft(*words, cwd=scratch).returncode == 0
    said = stopped("train", "--resume", "run", "--steps", "2")
    assert said.startswith("weft: stopped; it was not training; step 1 is saved in run/checkpoints/step-00000001;")
    assert (run / "launch.json").exists()


def test_an_early_template_runs_what_the_launch_asks_for(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (scratch / "says.py").write_text(SAYS)
    monkeypatch.syspath_prepend(str(scratch))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    env = os.environ | at_start(3) | LocalLauncher(pid=os.getpid()).to_env()
    with starting("weft.runtime.launch.child", 1), template("says", 3) as start:
        process = start(["word"], env, None)
        assert process.stdout is not None and process.stderr is not None
        with process.stdout as out, process.stderr as err:
            said = out.read().decode(), err.read().decode()
        assert process.wait() == 0
    assert said == ("['word'] 3 3\n", "")
