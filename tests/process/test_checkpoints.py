"""Checkpoints: a kill at any system call, the checkpoints that count, and the state that they cannot hold."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import weft
from tests.process.commands import losses, until
from tests.process.faults import calls_of, kill_at_call
from tests.process.harness import ChildError, spawn
from weft.runtime.record.run_folder import events
from weft.store.checkpoint import Manifest, Policy, aside, contribute, found_in, newest, prune, publish, tidy, verify

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
        spawn(1, saver_within, str(tmp_path / "killed"), kind, str(tmp_path / "again"), fresh=True)
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
    with pytest.raises(ChildError, match=r"a StepLR was not passed to run\.distribute"):
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
