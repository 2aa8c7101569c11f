"""Going on as a user does: `weft train --resume`, its messages, its refusals, and the files that stay intact."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.net import ordinary
from tests.process.commands import Command, gone, losses, started, until
from tests.process.commands import weft as command
from weft.store.checkpoint import found_in, newest, verify

JOB = """
import json, os, sys, time
import torch, weft
from torch import nn

run = weft.init(steps=40)
torch.manual_seed(run.seed)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
noise = torch.Generator().manual_seed(run.rank)
model, optimizer, scheduler, noise = run.distribute(model, optimizer, scheduler, noise)
data = [torch.full((3, 4), float(i)) for i in range(24)]
for x in run.shard(data, epochs=None):
    {body}
    loss = (model(x + 0.1 * torch.rand(x.shape, generator=noise)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    run.log(loss=loss)
sys.stdout.write(" ".join(p.sum().item().hex() for p in model.parameters()) + "\\n")
"""


def script(folder: Path, body: str = "time.sleep(0.02)", name: str = "job.py") -> Path:
    path = folder / name
    path.write_text(JOB.format(body=body))
    return path


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """What a job says of its final parameters."""
    return next(line for line in reversed(done.stdout.splitlines()) if line.startswith("[0]"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, weft: Command) -> tuple[list[float], str]:
    """The uninterrupted run: losses and final parameters."""
    folder = tmp_path_factory.mktemp("whole")
    done = weft("train", script(folder, "pass"), "-n", 2, "--out", "run", "--save-every", 10, cwd=folder)
    assert done.returncode == 0, done.stderr
    return losses(folder / "run"), last_words(done)


@pytest.mark.parametrize("number", range(3))
def test_a_killed_launcher_leaves_a_run_that_goes_on(scratch: Path, whole: Any, number: int, weft: Command) -> None:
    """SIGKILL for the launcher, at a random moment after the first save; its processes die with it."""
    script(scratch)
    launcher = started(scratch, "--save-every", 5)
    until(lambda: found_in(scratch / "run/checkpoints"))
    time.sleep(random.Random(number).uniform(0.0, 0.4))
    launcher.kill()
    launcher.communicate()
    assert gone(scratch)
    done = weft("train", "--resume", "run", cwd=scratch)
    assert done.returncode == 0, done.stderr
    assert "resuming after step" in done.stdout
    assert (losses(scratch / "run"), last_words(done)) == whole
    word = json.loads((scratch / "run/resumed.jsonl").read_text().splitlines()[-1])
    assert word["attempt"] == 1 and word["step"] % 5 == 0


def test_sigterm_saves_and_leaves(scratch: Path, whole: Any, weft: Command) -> None:
    script(scratch)
    launcher = started(scratch, "--save-every", 1000)
    until(lambda: (scratch / "run/events-0.jsonl").exists() and (scratch / "run/events-0.jsonl").stat().st_size)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 143 and "; resume with `weft train --resume run`" in said
    assert gone(scratch) and len(found_in(scratch / "run/checkpoints")) == 1
    done = weft("train", "--resume", "run", cwd=scratch)
    assert done.returncode == 0, done.stderr
    assert (losses(scratch / "run"), last_words(done)) == whole
    assert "all 40 steps are done" in weft("train", "--resume", "run", cwd=scratch).stdout
    environment = json.loads((scratch / "run/environment.json").read_text()) | {"steps": None}
    (scratch / "run/environment.json").write_text(json.dumps(environment))  # as of a job that sets no limit
    assert "the job's loop has ended; to train on, give" in weft("train", "--resume", "run", cwd=scratch).stdout


def test_a_run_is_not_resumed_beside_itself(scratch: Path, weft: Command) -> None:
    script(scratch, "time.sleep(0.3)")
    launcher = started(scratch, "--save-every", 2)
    try:
        until(lambda: found_in(scratch / "run/checkpoints"))
        assert "run is in use by a running run; wait for its end, or stop it first" in refused(
            scratch, "--resume", "run"
        )
    finally:
        launcher.kill()
        launcher.communicate()
    assert gone(scratch)
    assert weft("train", "--resume", "run", "--steps", 6, cwd=scratch).returncode == 0


def test_a_run_that_is_through_goes_on_with_more_steps(scratch: Path, weft: Command) -> None:
    script(scratch, "pass")
    options = ("-n", 2, "--save-every", 1000)
    longer = weft("train", "job.py", *options, "--out", "one", "--steps", 33, cwd=scratch)
    assert weft("train", "job.py", *options, "--out", "two", "--steps", 20, cwd=scratch).returncode == 0
    done = weft("train", "--resume", "two", "--json", "-", cwd=scratch)
    assert done.returncode == 0 and json.loads(done.stdout)["steps"] == 20
    more = "all 20 steps are done; to train on, give a larger number: weft train --resume two --steps 40"
    assert more in done.stderr and not (scratch / "two/resumed.jsonl").exists()
    again = weft("train", "--resume", "two", "--steps", 33, "--json", "-", cwd=scratch)
    assert again.returncode == 0, again.stderr
    assert losses(scratch / "one") == losses(scratch / "two") and len(losses(scratch / "two")) == 33
    assert longer.returncode == 0


def test_another_number_of_workers_or_strategy_is_converted_and_said(scratch: Path, weft: Command) -> None:
    script(scratch, "pass")
    topk = "bsp / direct / error_feedback(topk(ratio=0.5))"
    assert (
        weft("train", "job.py", "-n", 4, "--out", "run", "--steps", 5, "--strategy", topk, cwd=scratch).returncode == 0
    )
    dense = weft("train", "--resume", "run", "--steps", 8, "--strategy", "bsp / ring", cwd=scratch)
    assert dense.returncode == 0, dense.stderr
    assert "error_feedback(topk(ratio=0.5)) has become dense: the residual is lost" in dense.stdout
    fewer = weft("train", "--resume", "run", "--steps", 12, "-n", 2, cwd=scratch)
    assert fewer.returncode == 0, fewer.stderr
    assert "4 workers have become 2" in fewer.stdout


def test_what_chose_the_strategy_need_not_be_there_again(scratch: Path, weft: Command) -> None:
    """A resumed run keeps the checkpoint's strategy, and its folder keeps its name."""
    script(scratch, "pass")
    options = ("train", "job.py", "-n", 2, "--out", "runs/mine", "--steps", 3)
    assert weft(*options, cwd=scratch, WEFT_STRATEGY="bsp / ring / cast").returncode == 0
    done = weft("train", "--resume", "runs/mine", "--steps", 5, "--json", "-", cwd=scratch)
    row = json.loads(done.stdout)
    assert (row["strategy"], row["folder"], row["steps"]) == ("bsp / ring / cast", "runs/mine", 5)
    assert "bsp / ring / cast (from the checkpoint of runs/mine)" in done.stderr


def test_checkpoints_are_readable_without_weft(scratch: Path, weft: Command) -> None:
    script(scratch, "pass")
    done = weft("train", "job.py", "-n", 2, "--out", "run", "--save-every", 15, "--keep-last", 3, cwd=scratch)
    assert done.returncode == 0, done.stderr
    assert [folder.name for folder in found_in(scratch / "run/checkpoints")] == [f"step-{n:08d}" for n in (40, 30, 15)]
    last = scratch / "run/checkpoints/step-00000040"
    state: dict[str, torch.Tensor] = {}
    for file in last.glob("model-*.safetensors"):
        state |= load_file(file)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
    model.load_state_dict(state)
    assert last_words(done) == "[0] " + " ".join(p.sum().item().hex() for p in model.parameters())
    told = subprocess.run(["sha256sum", "-c", "manifest.sha256"], cwd=last, capture_output=True, text=True, check=True)
    assert told.stdout == "manifest.json: OK\n"


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, weft: Command) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    script(folder, "pass")
    done = weft("train", "job.py", "-n", 2, "--out", "run", "--save-every", 20, "--steps", 40, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def refused(folder: Path, *args: Any) -> str:
    done = command("train", *args, cwd=folder)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("weft: ") and done.stderr.count("\n") == 1
    return done.stderr


def test_what_cannot_go_on_is_refused_in_one_sentence(saved: Path) -> None:
    assert "--resume nowhere does not exist" in refused(saved, "--resume", "nowhere")
    assert "has no launch.json, so it is not a run folder" in refused(saved, "--resume", ".")
    assert "nothing to train" in refused(saved)
    script(saved, name="other.py")
    assert "is a run of" in refused(saved, "other.py", "--resume", "run")
    assert "--keep-last is 0" in refused(saved, "job.py", "--keep-last", 0)
    changed = (
        JOB.format(body="pass").replace("nn.Linear(4, 8)", "nn.Linear(4, 9)").replace("nn.Linear(8,", "nn.Linear(9,")
    )
    launch = saved / "run/launch.json"
    before, launched = (saved / "job.py").read_text(), launch.read_text()
    try:
        (saved / "job.py").write_text(changed)
        assert "is a checkpoint of another job: it has 0.weight with shape [8, 4]" in refused(
            saved, "--resume", "run", "--steps", 50
        )
        (saved / "job.py").write_text(before.replace("Adam(", "SGD("))
        assert "was made with Adam, but the job now has SGD" in refused(saved, "--resume", "run", "--steps", 50)
    finally:
        (saved / "job.py").write_text(before)
        launch.write_text(launched)
    assert [verify(folder).step for folder in found_in(saved / "run/checkpoints")] == [40, 20]


def test_a_damaged_checkpoint_is_left_out_and_named(scratch: Path, saved: Path, weft: Command) -> None:
    subprocess.run(["cp", "-r", saved / "run", saved / "job.py", scratch], check=True)
    damaged = scratch / "run/checkpoints/step-00000040/optimizer-0-of-2.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert "optimizer-0-of-2.safetensors has" in refused(scratch, "--resume", damaged.parent)
    launch = json.loads((scratch / "run/launch.json").read_text())
    (scratch / "run/launch.json").write_text(json.dumps(launch | {"job": str(scratch / "job.py")}))
    done = weft("train", "--resume", "run", cwd=scratch)
    assert done.returncode == 0, done.stderr
    assert (
        "bytes were written; it is skipped" in " ".join(done.stdout.split()).replace("but ", "")
        or "skipped" in done.stdout
    )
    assert "resuming after step 20" in done.stdout
    assert [verify(folder).step for folder in found_in(scratch / "run/checkpoints")] == [40, 20]


def test_a_checkpoint_that_was_being_replaced_is_found(scratch: Path, saved: Path, weft: Command) -> None:
    """The writer was killed between its two renames."""
    subprocess.run(["cp", "-r", saved / "run", scratch], check=True)
    root = scratch / "run/checkpoints"
    (root / "step-00000040").rename(root / ".old-00000040-0123456789ab")
    (root / "step-00000020").rename(scratch / "elsewhere")
    done = weft("train", "--resume", "run", "--steps", 41, cwd=scratch)
    assert done.returncode == 0, done.stderr
    assert "resuming after step 40" in done.stdout and f"the job is {saved / 'job.py'}" in "".join(
        done.stdout.split("\n")
    )


def test_a_job_that_only_the_run_folder_names_is_not_run(scratch: Path, saved: Path) -> None:
    """Where it lies in that folder, or belongs to somebody else: the folder may come from anywhere."""
    subprocess.run(["cp", "-r", saved / "run", scratch], check=True)
    launch = json.loads((scratch / "run/launch.json").read_text())
    script(scratch / "run", "open('ran', 'w')")
    (scratch / "run/launch.json").write_text(json.dumps(launch | {"job": "run/job.py"}))
    said = refused(scratch, "--resume", "run")
    assert "run/launch.json names the job run/job.py, which lies in the run folder" in said
    assert "name it yourself: weft train run/job.py --resume run" in said
    if os.geteuid() == 0:
        os.chown(script(scratch, "open('ran', 'w')"), 1234, 1234)
        (scratch / "run/launch.json").write_text(json.dumps(launch | {"job": str(scratch / "job.py")}))
        assert "which belongs to another user" in refused(scratch, "--resume", "run")
    assert not (scratch / "ran").exists()


def test_a_folder_without_permission(tmp_path: Path) -> None:
    """As an ordinary user: root may write anywhere."""
    train = f"{sys.executable} -m weft.cli train wide --out locked/run --steps 2 -- --size tiny"
    line = ["sh", "-c", f"cd $(mktemp -d) && mkdir locked && chmod 500 locked && {train}"]
    if os.geteuid() == 0:
        line = [sys.executable, ordinary.__file__, *line]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "the run folder locked/run cannot be written: Permission denied" in done.stderr


def test_a_disk_that_fills_spares_the_old_checkpoint(scratch: Path, weft: Command) -> None:
    """The run goes on and says so; when it ends, and its last state cannot be kept, it ends with that sentence."""
    disk = scratch / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        lines = ["import pathlib", "saved = pathlib.Path('disk/run/checkpoints/step-00000020')"]
        lines += ["while run.step == 25 and not saved.exists(): time.sleep(0.01)"]
        lines += ["run.step == 25 and pathlib.Path('disk/filler').write_bytes(bytes(2**22))"]
        body = "".join(f"\n        {line}" for line in lines)
        guarded = f"\n    try:{body}\n    except OSError:\n        pass"
        script(scratch, guarded)
        done = weft("train", "job.py", "-n", 2, "--out", "disk/run", "--save-every", 10, cwd=scratch)
        assert done.returncode != 0 and "No space left on device" in done.stdout + done.stderr
        assert verify(newest(disk / "run/checkpoints")[0]).step == 20
        assert gone(scratch)
    finally:
        subprocess.run(["umount", disk], check=True)
