"""Going on as a user does: `weft train --resume`, what it says, what it refuses, and what stays intact."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Sampler, TensorDataset

import weft
from tests.net import ordinary
from tests.process.faults import calls_of, kill_at_call
from tests.process.harness import ChildError, spawn
from tests.process.test_launch import WEFT, gone, scratch
from tests.process.test_launch import weft as command
from weft.runtime.record.run_folder import events
from weft.store.checkpoint import Manifest, Policy, aside, contribute, found_in, newest, prune, publish, tidy, verify

__all__ = ["scratch"]

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


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder)]


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """What a job says of its final parameters."""
    return next(line for line in reversed(done.stdout.splitlines()) if line.startswith("[0]"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], str]:
    """The uninterrupted run: losses and final parameters."""
    folder = tmp_path_factory.mktemp("whole")
    done = command("train", script(folder, "pass"), "-n", 2, "--out", "run", "--save-every", 10, cwd=folder)
    assert done.returncode == 0, done.stderr
    return losses(folder / "run"), last_words(done)


def started(folder: Path, *args: Any) -> subprocess.Popen[str]:
    line = [*WEFT, "train", "job.py", "-n", "2", "--out", "run", *map(str, args)]
    return subprocess.Popen(
        line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def until(condition: Any, within_s: float = 40) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("number", range(3))
def test_a_killed_launcher_leaves_a_run_that_goes_on(scratch: Path, whole: Any, number: int) -> None:
    """SIGKILL for the launcher, at a random moment after the first save; its processes die with it."""
    script(scratch)
    launcher = started(scratch, "--save-every", 5)
    until(lambda: found_in(scratch / "run/checkpoints"))
    time.sleep(random.Random(number).uniform(0.0, 0.4))
    launcher.kill()
    launcher.communicate()
    assert gone(scratch)
    done = command("train", "--resume", "run", cwd=scratch)
    assert done.returncode == 0, done.stderr
    assert "resuming after step" in done.stdout
    assert (losses(scratch / "run"), last_words(done)) == whole
    word = json.loads((scratch / "run/resumed.jsonl").read_text().splitlines()[-1])
    assert word["attempt"] == 1 and word["step"] % 5 == 0


def test_sigterm_saves_and_leaves(scratch: Path, whole: Any) -> None:
    script(scratch)
    launcher = started(scratch, "--save-every", 1000)
    until(lambda: (scratch / "run/events-0.jsonl").exists() and (scratch / "run/events-0.jsonl").stat().st_size)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=60)
    assert (
        launcher.returncode == 143 and "job was stopped, after it was saved; resume with `weft train --resume" in said
    )
    assert gone(scratch) and len(found_in(scratch / "run/checkpoints")) == 1
    done = command("train", "--resume", "run", cwd=scratch)
    assert done.returncode == 0, done.stderr
    assert (losses(scratch / "run"), last_words(done)) == whole


def test_a_run_is_not_resumed_beside_itself(scratch: Path) -> None:
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
    assert command("train", "--resume", "run", "--steps", 6, cwd=scratch).returncode == 0


def test_a_run_that_is_through_goes_on_with_more_steps(scratch: Path) -> None:
    script(scratch, "pass")
    options = ("-n", 2, "--save-every", 1000)
    longer = command("train", "job.py", *options, "--out", "one", "--steps", 33, cwd=scratch)
    assert command("train", "job.py", *options, "--out", "two", "--steps", 20, cwd=scratch).returncode == 0
    again = command("train", "--resume", "two", "--steps", 33, "--json", "-", cwd=scratch)
    assert again.returncode == 0, again.stderr
    assert losses(scratch / "one") == losses(scratch / "two") and len(losses(scratch / "two")) == 33
    assert longer.returncode == 0


def test_another_number_of_workers_or_strategy_is_converted_and_said(scratch: Path) -> None:
    script(scratch, "pass")
    topk = "bsp / direct / error_feedback(topk(ratio=0.5))"
    assert (
        command("train", "job.py", "-n", 4, "--out", "run", "--steps", 5, "--strategy", topk, cwd=scratch).returncode
        == 0
    )
    dense = command("train", "--resume", "run", "--steps", 8, "--strategy", "bsp / ring", cwd=scratch)
    assert dense.returncode == 0, dense.stderr
    assert "error_feedback(topk(ratio=0.5)) has become dense: the residual is lost" in dense.stdout
    fewer = command("train", "--resume", "run", "--steps", 12, "-n", 2, cwd=scratch)
    assert fewer.returncode == 0, fewer.stderr
    assert "4 workers have become 2" in fewer.stdout


def test_what_chose_the_strategy_need_not_be_there_again(scratch: Path) -> None:
    """A resumed run keeps the checkpoint's strategy, and its folder keeps its name."""
    script(scratch, "pass")
    options = ("train", "job.py", "-n", 2, "--out", "runs/mine", "--steps", 3)
    assert command(*options, cwd=scratch, WEFT_STRATEGY="bsp / ring / cast").returncode == 0
    done = command("train", "--resume", "runs/mine", "--steps", 5, "--json", "-", cwd=scratch)
    row = json.loads(done.stdout)
    assert (row["strategy"], row["folder"], row["steps"]) == ("bsp / ring / cast", "runs/mine", 5)


def test_checkpoints_are_readable_without_weft(scratch: Path) -> None:
    script(scratch, "pass")
    done = command("train", "job.py", "-n", 2, "--out", "run", "--save-every", 15, "--keep-last", 3, cwd=scratch)
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
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    script(folder, "pass")
    done = command("train", "job.py", "-n", 2, "--out", "run", "--save-every", 20, "--steps", 40, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def refused(folder: Path, *args: Any) -> str:
    done = command("train", *args, cwd=folder)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("weft: ") and done.stderr.count("\n") == 1
    return done.stderr


def test_what_cannot_go_on_is_refused_in_one_sentence(saved: Path) -> None:
    assert "has no launch.json, so it is not a run folder" in refused(saved, "--resume", "nowhere")
    assert "nothing to train" in refused(saved)
    script(saved, name="other.py")
    assert "is a run of" in refused(saved, "other.py", "--resume", "run")
    assert "--keep-last is 0" in refused(saved, "job.py", "--keep-last", 0)
    changed = (
        JOB.format(body="pass").replace("nn.Linear(4, 8)", "nn.Linear(4, 9)").replace("nn.Linear(8,", "nn.Linear(9,")
    )
    before = (saved / "job.py").read_text()
    try:
        (saved / "job.py").write_text(changed)
        assert "is a checkpoint of another job: it has 0.weight with shape [8, 4]" in refused(saved, "--resume", "run")
        (saved / "job.py").write_text(before.replace("Adam(", "SGD("))
        assert "was made with Adam, but the job now has SGD" in refused(saved, "--resume", "run")
    finally:
        (saved / "job.py").write_text(before)
    assert [verify(folder).step for folder in found_in(saved / "run/checkpoints")] == [40, 20]


def test_a_damaged_checkpoint_is_left_out_and_named(scratch: Path, saved: Path) -> None:
    subprocess.run(["cp", "-r", saved / "run", saved / "job.py", scratch], check=True)
    damaged = scratch / "run/checkpoints/step-00000040/optimizer-0-of-2.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert "optimizer-0-of-2.safetensors has" in refused(scratch, "--resume", damaged.parent)
    launch = json.loads((scratch / "run/launch.json").read_text())
    (scratch / "run/launch.json").write_text(json.dumps(launch | {"job": str(scratch / "job.py")}))
    done = command("train", "--resume", "run", cwd=scratch)
    assert done.returncode == 0, done.stderr
    assert (
        "bytes were written; it is skipped" in " ".join(done.stdout.split()).replace("but ", "")
        or "skipped" in done.stdout
    )
    assert "resuming after step 20" in done.stdout
    assert [verify(folder).step for folder in found_in(scratch / "run/checkpoints")] == [40, 20]


def test_a_checkpoint_that_was_being_replaced_is_found(scratch: Path, saved: Path) -> None:
    """The writer was killed between its two renames."""
    subprocess.run(["cp", "-r", saved / "run", scratch], check=True)
    root = scratch / "run/checkpoints"
    (root / "step-00000040").rename(root / ".old-00000040-0123456789ab")
    (root / "step-00000020").rename(scratch / "elsewhere")
    done = command("train", "--resume", "run", "--steps", 41, cwd=scratch)
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


def test_a_disk_that_fills_spares_the_old_checkpoint(scratch: Path) -> None:
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
        done = command("train", "job.py", "-n", 2, "--out", "disk/run", "--save-every", 10, cwd=scratch)
        assert done.returncode != 0 and "No space left on device" in done.stdout + done.stderr
        assert verify(newest(disk / "run/checkpoints")[0]).step == 20
        assert gone(scratch)
    finally:
        subprocess.run(["umount", disk], check=True)


# --- a kill at every system call --------------------------------------------------------------------------------------


def saver(root: str, pid_file: str) -> None:
    """Stops, and when it is woken makes a second checkpoint, as a run of one process does."""
    torch.set_num_threads(1)
    part = aside(Path(root), 2, "token")
    files = {"model-0-of-1.safetensors": {"w": torch.full((64,), 2.0)}, "worker-0.safetensors": {"d": torch.ones(8)}}
    about: dict[str, Any] = {"workers": 1, "strategy": "bsp / direct", "seed": 0, "job": {}}
    manifest = Manifest(step=2, files={}, state={}, **about)
    Path(pid_file).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    contribute(part, 0, files, {})
    publish(Path(root), part, 1, manifest, 1.0)
    prune(Path(root), Policy(last=1), {2})


def test_a_kill_at_any_system_call_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    pytest.importorskip("weft")
    if subprocess.run(["which", "strace"], capture_output=True, check=False).returncode:
        pytest.skip("strace is not installed")
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "weft", "weft.runtime.run", "torch.distributed", "torch._dynamo"])

    def begin(root: Path) -> Any:
        part = aside(root, 1, "token")
        contribute(part, 0, {"model-0-of-1.safetensors": {"w": torch.ones(64)}}, {})
        about: dict[str, Any] = {"workers": 1, "strategy": "bsp / direct", "seed": 0, "job": {}}
        publish(root, part, 1, Manifest(step=1, files={}, state={}, **about), 1.0)
        pid = root.with_suffix(".pid")
        child = context.Process(target=saver, args=(str(root), str(pid)))
        child.start()
        until(lambda: _stopped(child.pid))
        return child

    child = begin(tmp_path / "count")
    calls = calls_of(child.pid, tmp_path / "log")
    child.join()
    assert child.exitcode == 0 and sum(calls.values()) > 20 and newest(tmp_path / "count")[1].step == 2
    assert {"openat", "write", "fsync", "rename"} <= set(calls)
    steps = set()
    for call, number in ((call, number) for call, count in calls.items() for number in range(1, count + 1)):
        root = tmp_path / f"{call}-{number}"
        child = begin(root)
        kill_at_call(child.pid, call, number, tmp_path / "log")
        child.join()
        assert child.exitcode == -signal.SIGKILL, f"call {number} of {call}"
        folder, manifest, damaged = newest(root)
        assert not damaged
        weights = load_file(folder / "model-0-of-1.safetensors")["w"]
        assert weights.equal(torch.full((64,), float(manifest.step)))
        steps.add(manifest.step)
        tidy(root)
        assert newest(root)[1].step == manifest.step and not list(root.glob(".*"))
    assert steps == {1, 2}


def _stopped(pid: int) -> bool:
    return "State:\tT" in Path(f"/proc/{pid}/status").read_text()


# --- which checkpoints count ------------------------------------------------------------------------------------------


def counting(folder: str, steps: int, hold_s: float = 0.0) -> float:
    run = weft.init(out=folder, steps=steps, save_every=2)
    model: Any = torch.nn.Linear(4, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    run.distribute(model, optimizer)
    for x in run.shard([torch.full((2, 4), 0.1 * i) for i in range(80)]):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        time.sleep(hold_s)
    run.close()
    return float(model.weight.detach().sum())


def steps_in(folder: Path) -> list[int]:
    return [verify(each).step for each in found_in(folder / "checkpoints")]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_goes_back_keeps_its_own_checkpoints(tmp_path: Path, processes: int) -> None:
    expected = spawn(processes, counting, str(tmp_path / "whole"), 5)
    spawn(processes, counting, str(tmp_path / "run"), 8)
    assert steps_in(tmp_path / "run") == [8, 6]
    (found_in(tmp_path / "run/checkpoints")[0] / "manifest.sha256").unlink()
    spawn(processes, counting, str(tmp_path / "run"), 10, WEFT_RESUME=str(tmp_path / "run/checkpoints/step-00000006"))
    assert steps_in(tmp_path / "run") == [10, 8]
    assert [each.name for each in (tmp_path / "run/checkpoints").glob(".*")] == [".damaged-00000008"]
    back = str(tmp_path / "run/checkpoints/step-00000008")
    spawn(processes, counting, str(tmp_path / "run"), 9, WEFT_RESUME=back)
    assert steps_in(tmp_path / "run") == [9, 8] and newest(tmp_path / "run/checkpoints")[1].step == 9
    assert [each.name for each in (tmp_path / "run/checkpoints").glob(".*")] == [".abandoned-00000010"]
    assert [event["step"] for event in events(tmp_path / "run")] == list(range(1, 10))
    with pytest.raises(ChildError, match="was set aside; to resume from it, rename it to step-00000010"):
        spawn(
            processes,
            counting,
            str(tmp_path / "run"),
            12,
            WEFT_RESUME=back.replace("step-00000008", ".abandoned-00000010"),
        )
    assert spawn(processes, counting, str(tmp_path / "run"), 5) == expected  # and one that starts over
    assert steps_in(tmp_path / "run") == [5, 4]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and len(losses(tmp_path / "run")) == 5


def test_a_second_run_in_a_folder_is_refused(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as beside:
        first = beside.submit(spawn, 1, counting, str(tmp_path / "run"), 40, 0.25)
        until(lambda: found_in(tmp_path / "run/checkpoints"))
        with pytest.raises(ChildError, match="run is in use by a running run; wait for its end, or stop it first"):
            spawn(1, counting, str(tmp_path / "run"), 4)
        first.result()
    assert steps_in(tmp_path / "run") == [40, 38]


class Meter:
    """Holds as many losses as this process has found worth keeping."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def spoilt(folder: str, kind: str) -> None:
    """A run whose second save would be no good."""
    run = weft.init(out=folder, steps=6, save_every=2)
    model: Any = torch.nn.Linear(4, 2)
    model.register_buffer("mask", torch.full((2,), -float("inf")))
    model.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)  # what backward sees is found in backward
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = Meter()
    run.distribute(model, optimizer, meter)
    for x in run.shard([torch.full((2, 4), 0.1 * i) for i in range(80)]):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "meter" and run.step > 2 and (run.rank == 0 or run.step % 2):
            meter.seen.append(loss.detach())
        if kind == "overflow" and run.step == 4:
            model.frozen[1] = float("inf")
    run.close()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("meter", r"step 4 is not written: process 1 has other tensors than process 0 \(followers/0/seen/\d\)"),
        ("overflow", "The checkpoint of step 4 is not written, because frozen is NaN or infinite"),
    ],
)
def test_a_checkpoint_that_would_be_no_good_is_not_published(tmp_path: Path, kind: str, said: str) -> None:
    with pytest.raises(ChildError, match=said) as error:
        spawn(2, spoilt, str(tmp_path / "run"), kind)
    assert error.value.kind == "LoopError"
    assert steps_in(tmp_path / "run") == [2]
    spawn(2, spoilt, str(tmp_path / "run"), "fine", WEFT_RESUME=str(tmp_path / "run/checkpoints/step-00000002"))
    assert steps_in(tmp_path / "run") == [6, 4]


def saver_within(folder: str, kind: str, notes: str) -> None:
    """Asks for a save where a step begins, or within one; ends without a goodbye two steps later."""
    run = weft.init(out=folder, steps=9, save_every=1000)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    run.distribute(model, optimizer)
    samples = Noisy()
    with Path(notes).open("a") as file:
        for number, (x,) in enumerate(run.shard(DataLoader(samples, batch_size=2), epochs=None)):
            if run.step == 4 and (kind == "top" or number % 2):
                run.save()
            last = kind == "top" or number % 2
            with contextlib.nullcontext() if last else run.accumulate():
                loss = model(x).square().sum()
                loss.backward()
            file.write(f"{run.step} {bool(last)} {x.sum().item().hex()} {loss.item().hex()}\n")
            file.flush()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            if run.step == 7 and not os.environ.get("WEFT_RESUME") and folder.endswith("killed"):
                until(lambda: found_in(Path(folder) / "checkpoints"))
                os._exit(0)
    run.close()


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with noise that is drawn when they are read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> Any:
        return (at + torch.rand(1),)


@pytest.mark.parametrize("kind", ["top", "accumulated"])
def test_a_save_within_a_step_loses_no_batch(tmp_path: Path, kind: str) -> None:
    spawn(1, saver_within, str(tmp_path / "whole"), kind, str(tmp_path / "notes"))
    with pytest.raises(ChildError):
        spawn(1, saver_within, str(tmp_path / "killed"), kind, str(tmp_path / "again"))
    saved = newest(tmp_path / "killed/checkpoints")[0]
    before = (tmp_path / "again").read_text().splitlines()
    spawn(1, saver_within, str(tmp_path / "killed"), kind, str(tmp_path / "again"), WEFT_RESUME=str(saved))
    reached = int(saved.name[5:])
    kept = [line for line in before if int(line.split()[0]) < reached]
    rest = (tmp_path / "again").read_text().splitlines()[len(before) :]
    assert kept + rest == (tmp_path / "notes").read_text().splitlines()


def lazy(folder: str, steps: int) -> list[str]:
    """A buffer outside of the state_dict that forward makes, lets grow, and computes with."""
    run = weft.init(out=folder, steps=steps, save_every=2)
    model = Growing()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    run.distribute(model, optimizer)
    found = []
    for x in run.shard([torch.full((2, 4), 0.1 * i) for i in range(80)]):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(f"{run.step} {loss.item().hex()}")
    run.close()
    return found


class Growing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 2)
        self.register_buffer("late", None, persistent=False)
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.mean().view(1)])
        self.late = torch.full((3,), 7.0) if self.late is None else self.late * 0.5
        return self.inner(x) * self.seen.sum() + self.late.sum()  # type: ignore[no-any-return]


def test_buffers_outside_of_the_state_dict_come_back(tmp_path: Path) -> None:
    (whole,) = spawn(1, lazy, str(tmp_path / "whole"), 7)
    (first,) = spawn(1, lazy, str(tmp_path / "run"), 4)
    (rest,) = spawn(1, lazy, str(tmp_path / "run"), 7, WEFT_RESUME=str(newest(tmp_path / "run/checkpoints")[0]))
    assert first + rest == whole


# --- what a checkpoint cannot hold ------------------------------------------------------------------------------------


def loop(folder: str, kind: str) -> int:
    run = weft.init(out=folder, steps=6, save_every=2)
    model: Any = torch.nn.Linear(4, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "unknown scheduler":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    followers = [object()] if kind == "no state" else []
    run.distribute(model, optimizer, *followers)
    for x in run.shard([torch.ones(2, 4)] * 40):
        if kind == "zeroed first":
            optimizer.zero_grad()
        elif kind == "zeroed in place":
            model.zero_grad(set_to_none=True)
        model(x).sum().backward()
        optimizer.step()
        if kind == "unknown scheduler":
            scheduler.step()
    steps = run.step
    run.close()
    return steps


def test_what_a_checkpoint_would_miss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="a StepLR was not passed to the run"):
        spawn(1, loop, str(tmp_path / "a"), "unknown scheduler")
    with pytest.raises(ChildError, match="was given a object, which has no state_dict"):
        spawn(1, loop, str(tmp_path / "b"), "no state")


@pytest.mark.parametrize("processes", [1, 2])
def test_gradients_that_nobody_clears_are_not_resumed_without(tmp_path: Path, processes: int) -> None:
    for kind, fine in (("zeroed first", True), ("zeroed in place", True), ("never zeroed", False)):
        folder = tmp_path / kind.replace(" ", "-")
        spawn(processes, loop, str(folder), kind)
        from_here = str(folder / "checkpoints/step-00000004")
        if fine:
            assert spawn(processes, loop, str(folder), kind, WEFT_RESUME=from_here) == [6] * processes
        else:
            with pytest.raises(ChildError, match="adds to the gradients of the previous step"):
                spawn(processes, loop, str(folder), kind, WEFT_RESUME=from_here)


# --- data -------------------------------------------------------------------------------------------------------------


def reader(folder: str, steps: int, kind: str) -> list[int]:
    """Samples 0 to 23 in a random order, one a batch; returns those that this process has seen in one epoch."""
    run = weft.init(out=folder, steps=steps, save_every=1)
    model: Any = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
    run.distribute(model, optimizer)
    samples = TensorDataset(torch.arange(24.0).view(24, 1))
    loader: Any = DataLoader(samples, batch_size=1, shuffle=True)
    if kind == "a stream":
        loader = (each for each in loader)
    seen = []
    for (x,) in run.shard(loader):
        if run._turns.share:  # one without a batch computes on another's, which counts for nothing
            seen.append(int(x))
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return seen


@pytest.mark.parametrize("kind", ["a loader", "a stream"])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 1)])
def test_each_sample_once_an_epoch_whatever_the_number_of_workers(
    tmp_path: Path, before: int, after: int, kind: str
) -> None:
    first = spawn(before, reader, str(tmp_path / "run"), 3, kind)
    checkpoint = str(newest(tmp_path / "run/checkpoints")[0])
    rest = spawn(after, reader, str(tmp_path / "run"), 1000, kind, WEFT_RESUME=checkpoint)
    assert [len(seen) for seen in first] == [3] * before
    assert sorted(sample for seen in (*first, *rest) for sample in seen) == list(range(24))


class Counting(Sampler[int]):
    """An order for each of its epochs, which it counts."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class ByPython(Counting):
    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(12), 12))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(12).tolist()


def goes_on(folder: str, kind: str, steps: int) -> list[tuple[list[int], float]]:
    """Two epochs and more; by step, the samples of this process and a random number that the loop draws."""
    run = weft.init(out=folder, steps=steps, save_every=1)
    model: Any = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
    own = torch.Generator().manual_seed(5)
    run.distribute(model, optimizer, own)
    samples = TensorDataset(torch.arange(12.0).view(12, 1))
    loaders: dict[str, Any] = {
        "counting": DataLoader(samples, batch_size=1, sampler=Counting()),
        "python": DataLoader(samples, batch_size=1, sampler=ByPython()),
        "endless": DataLoader(samples, batch_size=1, sampler=Endless()),
        "list": [(x,) for x in torch.randperm(12, generator=own).view(12, 1, 1).float()],
    }
    seen = []
    for _ in range(3):
        if kind == "zip":
            one, two = (DataLoader(samples, batch_size=1, shuffle=True) for _ in range(2))
            passes = zip(run.shard(one), run.shard(two), strict=True)
        elif kind == "new lists":  # from the loop's own random numbers, and from the worker's
            order = torch.randperm(12, generator=own)
            order = order if run.workers > 1 else order[torch.randperm(12)]
            passes = zip(run.shard([(x,) for x in order.view(12, 1, 1).float()]), strict=True)
        else:
            passes = zip(run.shard(loaders[kind]), strict=True)
        for taken in passes:
            noise = torch.rand(()).item() + torch.rand((), generator=own).item() + random.random()
            (sum(model(x).sum() for (x,) in taken) * noise).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(([int(x) for (x,) in taken], noise))
            if kind == "endless" and run.step * run.workers % 12 == 0:
                break
    run.close()
    return seen


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", ["counting", "python", "endless", "list", "zip", "new lists"])
def test_data_goes_on_where_it_was(tmp_path: Path, kind: str, processes: int) -> None:
    """As an uninterrupted run has it, from within the second epoch on."""
    whole = spawn(processes, goes_on, str(tmp_path / "whole"), kind, 32 // processes)
    stop = 16 // processes
    spawn(processes, goes_on, str(tmp_path / "run"), kind, stop)
    checkpoint = str(newest(tmp_path / "run/checkpoints")[0])
    rest = spawn(processes, goes_on, str(tmp_path / "run"), kind, 32 // processes, WEFT_RESUME=checkpoint)
    for mine, theirs in zip(rest, whole, strict=True):
        assert mine == theirs[stop:]
