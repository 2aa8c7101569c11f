"""Signs of life: a process that holds Python's lock is alive, one that is stopped is not, and it is named."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.process import commands
from tests.process.commands import Command, Job
from tests.process.harness import spawn
from weft.errors import UserError
from weft.transport.heartbeat import WITHOUT_NATIVE_S, Pulse, peer_timeout_s, prepare

STRATEGIES = ["bsp / direct", "bsp / ring", "bsp / direct / int8", "bsp / parameter_server"]

JOB = """
import ctypes, os, pathlib, signal, time
import torch, weft

run = weft.init(steps=8)
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = run.distribute(model, optimizer)
for x in run.shard([torch.ones(2, 300)] * 100):
    if run.rank == 1 and run.step == 2:
        ctypes.PyDLL(None).usleep(int(1e6 * float(os.environ["HOLD_S"])))  # and does not let go of the lock
    if run.rank == 1 and run.step == 4:
        pathlib.Path("stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def hold_and_stop(folder: Path, strategy: str, hold_s: float, peer_timeout: str) -> tuple[str, float]:
    """A run whose worker 1 holds the lock at one step and stops at a later one: what it says, how long after that."""
    (folder / "job.py").write_text(JOB)
    line = ["train", "job.py", "-n", 2, "--strategy", strategy, "--save-every", 0]
    env = {"HOLD_S": str(hold_s), "WEFT_PEER_TIMEOUT_S": peer_timeout, "NO_COLOR": "1"}
    done = commands.weft(*line, cwd=folder, **env)
    assert done.returncode == 1, done.stderr
    assert (folder / "stopped").exists(), f"it was given up before it stopped: {done.stderr}"
    return " ".join(done.stderr.split()), time.time() - (folder / "stopped").stat().st_mtime


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_worker_that_holds_the_lock_lives_and_one_that_is_stopped_is_named(strategy: str, tmp_path: Path) -> None:
    said, after_s = hold_and_stop(tmp_path, strategy, 5.0, "2")
    assert re.search(r"worker (process )?1 (went away|was lost)", said), said
    assert after_s < 60, "the wait for a stopped worker has an end"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_twenty_seconds_with_the_lock(strategy: str, tmp_path: Path) -> None:
    said, _ = hold_and_stop(tmp_path, strategy, 20.0, "")
    assert re.search(r"worker (process )?1 (went away|was lost)", said), said


def test_silence_is_that_of_the_process_and_not_of_its_python() -> None:
    prepare()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = multiprocessing.get_context("spawn").Process(target=_beats, args=(listener.getsockname(),), daemon=True)
        child.start()
        listener.settimeout(60)
        pulse = Pulse(listener.accept()[0])
    try:
        assert child.pid is not None
        quiet = []
        for _ in range(20):  # the child has the lock, for longer than this takes
            time.sleep(0.1)
            quiet.append(pulse.silent_s() or 0.0)
        assert max(quiet) < 1.5
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: (pulse.silent_s() or 0.0) > 1.5)
        os.kill(child.pid, signal.SIGCONT)
        wait_for(lambda: pulse.silent_s() == 0.0)
        child.kill()
        wait_for(lambda: pulse.silent_s() is None)
    finally:
        child.kill()
        child.join()
        pulse.close()


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _beats(address: Any) -> None:
    prepare()
    pulse = Pulse(socket.create_connection(address))
    while pulse.silent_s() is not None:
        ctypes.PyDLL(None).usleep(60_000_000)


WITHOUT_A_COMPILER = """
import socket
from weft.transport.heartbeat import Pulse
with socket.create_server(("127.0.0.1", 0)) as listener:
    one = Pulse(socket.create_connection(listener.getsockname()))
    other = Pulse(listener.accept()[0])
    while one.limit_s(3.0) == 3.0:
        pass
print(one.limit_s(3.0), other.silent_s() < 10)
other.close()
while one.silent_s() is not None:
    pass
"""


def test_without_a_compiler_a_python_thread_beats_and_is_given_more_time(tmp_path: Path) -> None:
    env = os.environ | {"CXX": "false", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_COMPILER], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == [str(WITHOUT_NATIVE_S), "True"], done.stderr


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
def test_a_timeout_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=f"WEFT_PEER_TIMEOUT_S is '{value}', but must be a number of seconds above 0"):
        peer_timeout_s({"WEFT_PEER_TIMEOUT_S": value})


def test_it_is_refused_at_the_start_of_a_run(tmp_path: Path, weft: Command, job: Job) -> None:
    done = weft("train", job(JOB), "-n", 1, cwd=tmp_path, WEFT_PEER_TIMEOUT_S="soon", NO_COLOR="1")
    assert done.returncode == 2 and "WEFT_PEER_TIMEOUT_S is 'soon'" in " ".join(done.stderr.split())


def test_on_one_machine_nothing_listens_but_on_loopback() -> None:
    """Clusters set the interface of the collective library; a run on one machine does not use it."""
    places = spawn(2, _where, WEFT_STRATEGY="bsp / ring", GLOO_SOCKET_IFNAME="nosuch0")
    assert places == ["127.0.0.1"] * 2


def _where() -> str:
    import weft

    run = weft.init(steps=1)
    address = run.world.address()
    run.close()
    return address
