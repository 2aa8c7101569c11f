"""Launching as a user does: `weft train` as a command, what it says, what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.process.commands import WEFT, Command, children_of, gone

JOB = """
import os, signal, sys, time
import torch, weft
from torch import nn

run = weft.init({call})
torch.manual_seed(run.seed)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.distribute(model, optimizer)
data = [torch.full((3, 4), (i % 8) / 8) for i in range(4000)]
for i, x in enumerate(run.shard(data)):
    {body}
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=loss)
told = "done", run.rank, run.workers, run.step, run.strategy, run.seed, run.is_main
sys.stdout.write(" ".join(map(str, told)) + "\\n")  # one write, so that lines of several processes do not mix
"""


def script(folder: Path, body: str = "pass", call: str = "steps=6", name: str = "job.py") -> Path:
    path = folder / name
    path.write_text(JOB.format(body=body, call=call))
    return path


def test_a_run_leaves_a_summary_and_a_folder(scratch: Path, weft: Command) -> None:
    done = weft("train", script(scratch), "-n", 3, "--seed", 7, "--trace", "--json", "-", cwd=scratch)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["strategy"], row["workers"], row["steps"]) == ("bsp / direct", 3, 6)
    folder = scratch / row["folder"]
    names = {file.name for file in folder.iterdir()}
    expected = {
        "launch.json",
        "strategy.toml",
        "environment.json",
        "model.json",
        "checkpoints",
        ".launch.lock",
        ".run.lock",
    }
    assert expected | {f"trace-{p}.json" for p in range(3)} | {f"events-{p}.jsonl" for p in range(3)} == names
    assert [each.name for each in (folder / "checkpoints").iterdir()] == ["step-00000006"]  # the run's last state
    events = [json.loads(line) for line in (folder / "events-1.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events] == [1, 2, 3, 4, 5, 6]
    phases = ("forward", "backward", "encode", "exposed", "hidden", "decode", "optimizer")
    assert all(event[f"{phase}_s"] >= 0 for event in events for phase in phases)
    assert {f"{phase}_s" for phase in phases} | {"wire_bytes", "loss", "samples"} <= set(events[0])
    trace = json.loads((folder / "trace-0.json").read_text())
    assert {"forward", "backward", "optimizer", "bucket 0"} <= {event["name"] for event in trace["traceEvents"]}
    assert "[2] done 2 3 6 bsp / direct 7 False" in done.stderr


def test_the_first_failing_rank_speaks_last(scratch: Path, weft: Command) -> None:
    body = "if run.rank == 2 and i == 3: raise ValueError('on purpose')"
    done = weft("train", script(scratch, body), "-n", 3, cwd=scratch)
    assert done.returncode == 1
    assert "process 2 of the run failed: ValueError: on purpose" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: on purpose")
    assert "PeerLost" not in done.stderr.splitlines()[-1] and "runpy" not in done.stderr


def test_a_worker_that_leaves_the_loop_early_is_named(scratch: Path, weft: Command) -> None:
    body = "if run.rank == 1 and i == 3: break"
    done = weft("train", script(scratch, body), "-n", 2, cwd=scratch)
    assert done.returncode == 1
    last = "weft: worker process 1 left run.shard before the others; let all workers take as many steps"
    assert done.stderr.splitlines()[-1] == last and "Traceback" not in done.stderr


def test_a_killed_worker_is_named(scratch: Path, weft: Command) -> None:
    body = "if run.rank == 1 and i == 3: os.kill(os.getpid(), signal.SIGKILL)"
    done = weft("train", script(scratch, body), "-n", 3, cwd=scratch)
    assert done.returncode == 1
    assert "process 1 of the run was ended by SIGKILL" in done.stderr


LEAVES = "if i == 3 and run.rank == {rank}: open('left', 'w').write(str(subprocess.Popen(['sleep', '100']{how}).pid))"


@pytest.mark.parametrize(
    ("rank", "how", "then", "status"),
    [
        (0, "", "", 0),
        (0, ", start_new_session=True", "", 0),
        (1, "", "; os.kill(os.getpid(), signal.SIGKILL)", 1),
        (1, ", start_new_session=True", "; os.kill(os.getpid(), signal.SIGKILL)", 1),
    ],
    ids=["ends", "ends and leaves a daemon", "is killed", "is killed and leaves a daemon"],
)
def test_a_process_that_holds_the_output_does_not_hold_the_launcher(
    scratch: Path, rank: int, how: str, then: str, status: int
) -> None:
    body = "import subprocess\n    " + LEAVES.format(rank=rank, how=how) + then
    command = [*WEFT, "train", str(script(scratch, body)), "-n", "2"]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=60, check=False)
    if how:  # it left the process group, and is nobody's but the job's
        os.kill(int((scratch / "left").read_text()), signal.SIGKILL)
    assert done.returncode == status, done.stderr
    assert ("process 1 of the run was ended by SIGKILL" in done.stderr) == bool(status)


ORPHANED = """
import ctypes, pathlib, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come here, as they do under a supervisor
run = subprocess.Popen(sys.argv[1:])
while not pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text():
    time.sleep(0.005)
run.kill()  # its process is still starting
run.wait()
print("killed", flush=True)
sys.stdin.read()
"""


def test_a_launcher_killed_at_once_leaves_no_process_under_a_supervisor(scratch: Path) -> None:
    path = script(scratch, "time.sleep(0.05)", call="steps=4000")
    command = [sys.executable, "-c", ORPHANED, *WEFT, "train", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=scratch, text=True) as supervisor:
        assert supervisor.stdout is not None
        while supervisor.stdout.readline() not in ("killed\n", ""):
            pass
        until = time.monotonic() + 20
        while (left := set(children_of(scratch)) - {supervisor.pid}) and time.monotonic() < until:
            time.sleep(0.1)
        supervisor.communicate()
    for process in left:
        os.kill(process, signal.SIGKILL)
    for leftover in (scratch / "tmp").glob("weft-*"):
        shutil.rmtree(leftover)
    assert not left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_launcher(scratch: Path, number: signal.Signals) -> None:
    own = "import subprocess; i or subprocess.Popen(['sleep', '100'])  # a process of the job's own"
    path = script(scratch, f"{own}\n    time.sleep(0.05); print('alive', flush=True)", call="steps=4000")
    run = subprocess.Popen(
        [*WEFT, "train", str(path), "-n", "2"], cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert run.stdout is not None
    for line in run.stdout:
        if "alive" in line:
            break
    run.send_signal(number)
    said = run.communicate(timeout=20)[0]
    assert gone(scratch)
    if number == signal.SIGKILL:  # the launcher had no chance; what it made is only a file
        for leftover in (scratch / "tmp").glob("weft-*"):
            shutil.rmtree(leftover)
    else:
        assert run.returncode == 128 + number
        [saved] = scratch.glob("runs/*/checkpoints/step-*")
        where = saved.relative_to(scratch)
        told = f"weft: stopped at step {int(saved.name[5:])}; saved in {where}; resume with `weft train --resume "
        assert f"{told}{where.parents[1]}`\n" in said


def test_sigterm_to_every_process_saves(scratch: Path) -> None:
    """As systemd and Slurm send it: servers stay until their workers have saved."""
    path = script(scratch, "time.sleep(0.05); print('alive', flush=True)", call="steps=4000")
    command = [*WEFT, "train", str(path), "-n", "2", "--strategy", "bsp / parameter_server", "--out", "run"]
    run = subprocess.Popen(command, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.stdout is not None
    for line in run.stdout:
        if "alive" in line:
            break
    for process in {run.pid, *children_of(scratch)}:
        os.kill(process, signal.SIGTERM)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 143, said
    [saved] = (scratch / "run/checkpoints").glob("step-*")
    assert f"saved in run/checkpoints/{saved.name}; resume with `weft train --resume run`" in said


def test_a_progress_bar_is_shown_as_it_ends(scratch: Path, weft: Command) -> None:
    body = "i == 3 and sys.stdout.write('\\r10%' + 99_999 * '\\r20%' + '\\r100%\\r\\n')"
    done = weft("train", script(scratch, body), cwd=scratch)
    assert done.returncode == 0, done.stderr
    assert "[0] 100%\n" in done.stdout and "20%" not in done.stdout


def test_a_pipe_in_the_temporary_folder_holds_up_nobody(scratch: Path) -> None:
    (scratch / "tmp/weft-x").mkdir()
    os.mkfifo(scratch / "tmp/weft-x/lock")
    command = [*WEFT, "train", str(script(scratch)), "-n", "1"]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=60, check=False)
    shutil.rmtree(scratch / "tmp/weft-x")
    assert done.returncode == 0, done.stderr


def test_what_a_killed_launcher_left_goes_with_the_next(scratch: Path, weft: Command) -> None:
    (scratch / "tmp/weft-x").mkdir()
    (scratch / "tmp/weft-x/lock").touch()
    assert weft("train", script(scratch), cwd=scratch).returncode == 0
    assert not (scratch / "tmp/weft-x").exists()


def test_a_save_that_fails_on_another_rank_is_told(scratch: Path, weft: Command) -> None:
    body = "if run.rank == 1: import weft.runtime.checkpoint.writer as saving; saving.contribute = full"
    path = script(scratch, body)
    path.write_text("def full(*_): raise OSError(28, 'No space left on device')\n" + path.read_text())
    done = weft("train", path, "-n", 2, "--save-every", 2, cwd=scratch, WEFT_TIMEOUT_S="4")
    assert "[1] the checkpoint of step 2 was not written: No space left on device" in done.stderr + done.stdout


BAD = {
    "missing": (["train", "nowhere.py"], "does not exist"),
    "misspelt": (["train", "txt"], "did you mean 'text'"),
    "broken": (["train", "broken.py"], "does not parse: line 1"),
    "no init": (["train", "plain.py", "-n", "2"], "without calling weft.init()"),
    "no workers": (["train", "plain.py", "-n", "0"], "at least one worker"),
    "no gpu": (["train", "plain.py", "--device", "cuda"], "no GPU"),
    "device": (["train", "job.py", "--device", "tpu"], "must be auto, cpu or cuda"),
    "illegal": (["train", "plain.py", "--strategy", "asp / ring"], "asp cannot be combined with ring"),
    "answer": (["train", "plain.py", "--strategy", "bsp / rign"], "did you mean 'ring'"),
    "system": (["train", "plain.py", "--system", "horovd"], "did you mean 'horovod'"),
    "planned": (["train", "plain.py", "--system", "easgd"], "does not run yet"),
    "steps": (["train", "plain.py", "--steps", "0"], "at least one step"),
    "nodes": (["train", "plain.py", "-n", "2", "--nodes", "2"], "--rendezvous HOST:PORT"),
    "address": (["train", "plain.py", "-n", "2", "--nodes", "2", "--rendezvous", "here"], "HOST:PORT"),
    "processes": (["train", "plain.py", "-n", "2", "--processes", "3"], "between 1 and the 2 workers"),
    "file": (["train", "plain.py", "--strategy", "@none.toml"], "cannot be read"),
    "check": (["check", "asp / ring"], "Try 'bsp / ring'"),
    "command": (["trian"], "No such command"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(scratch: Path, case: str, weft: Command) -> None:
    (scratch / "broken.py").write_text("def x(:\n")
    (scratch / "plain.py").write_text("print('hello')\n")
    script(scratch)
    args, says = BAD[case]
    done = weft(*args, cwd=scratch)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (scratch / "runs").exists()


def test_a_port_in_use(scratch: Path, weft: Command) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = ["--nodes", "2", "--rendezvous", f"127.0.0.1:{port}"]
        done = weft("train", script(scratch), "-n", 2, *place, cwd=scratch)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr and "another port" in done.stderr


def test_two_nodes_meet_and_only_on_the_address_given(scratch: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    listeners = "print('listens', [l.split()[1] for l in open('/proc/net/tcp') if l.split()[3] == '0A'])"
    path = script(scratch, f"({listeners}) if i == 2 else None")
    nodes = []
    for rank in (1, 0):
        args = ["train", str(path), "-n", "2", "--nodes", "2", "--node-rank", str(rank)]
        args += ["--rendezvous", f"127.0.0.1:{port}", "--out", str(scratch / f"out-{rank}")]
        nodes.append(
            subprocess.Popen([*WEFT, *args], cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    said = [node.communicate(timeout=60)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert " 0 2 6 " in said[1] and " 1 2 6 " in said[0]
    assert f"0100007F:{port:04X}" in said[1] and f"00000000:{port:04X}" not in said[1]


def test_torchrun_and_plain_python_run_the_same_script(scratch: Path) -> None:
    path = script(scratch)
    alone = subprocess.run(
        [sys.executable, str(path)], cwd=scratch, capture_output=True, text=True, timeout=60, check=True
    )
    assert "done 0 1 6" in alone.stdout
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    both = subprocess.run(torchrun, cwd=scratch, capture_output=True, text=True, timeout=90, check=False)
    assert " 0 2 6 " in both.stdout and " 1 2 6 " in both.stdout, both.stderr


def test_who_chooses_the_strategy(scratch: Path, weft: Command) -> None:
    """Command line, WEFT_STRATEGY, weft.toml beside the job, the call, the default: each beats the next."""
    path = script(scratch, call="'bsp / ring / wfbp', steps=1")
    seen = [weft("train", path, cwd=scratch).stdout]
    (scratch / "weft.toml").write_text('strategy = "bsp / halving_doubling"\n')
    seen.append(weft("train", path, cwd=scratch).stdout)
    seen.append(weft("train", path, cwd=scratch, WEFT_STRATEGY="bsp / recursive_doubling").stdout)
    (scratch / "mine.toml").write_text('topology = "direct"\n[compression]\nname = "topk"\nratio = 0.5\n')
    seen.append(weft("train", path, "--strategy", "@mine.toml", cwd=scratch, WEFT_STRATEGY="bsp / ring").stdout)
    expected = [
        "bsp / ring / wfbp",
        "bsp / halving_doubling",
        "bsp / recursive_doubling",
        "bsp / direct / topk(ratio=0.5)",
    ]
    for said, strategy in zip(seen, expected, strict=True):
        assert f"done 0 1 1 {strategy} 0" in said
    assert all((f"1 worker, {strategy} (from " in said) for said, strategy in zip(seen, expected, strict=True))


def test_a_full_disk(scratch: Path) -> None:
    """A file system of 64 KiB, mounted in a namespace of its own."""
    inside = f"mount -t tmpfs -o size=64k none {scratch}/disk && exec {sys.executable} -m weft.cli train"
    command = f"{inside} {script(scratch, call='steps=4000')} -n 2 --out {scratch}/disk/run"
    (scratch / "disk").mkdir()
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command]
    done = subprocess.run(unshare, cwd=scratch, capture_output=True, text=True, timeout=120, check=False)
    if "unshare failed" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip("no user namespaces here")
    assert done.returncode == 2, done.stderr
    assert "cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
