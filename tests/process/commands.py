"""The command line in a process of its own, and the processes that it leaves."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.process import forked_command
from tests.process.forked_command import FOLDER
from weft.runtime.launch.process_groups import Process
from weft.runtime.launch.start import Start, can_fork, template
from weft.runtime.record.run_folder import events

WEFT = [sys.executable, "-m", "weft.cli"]
TIMEOUT_S = 120
Command = Callable[..., subprocess.CompletedProcess[str]]
"""The fixture `weft`."""
Job = Callable[..., Path]
"""The fixture `job`."""


def weft(*args: Any, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [*WEFT, *map(str, args)]
    if "PYTHONPATH" in env or not can_fork():
        return subprocess.run(
            command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    process = _forked()(list(map(str, args)), {**os.environ, **env, FOLDER: str(cwd)}, None)
    out, err = _outputs(process, command)
    return subprocess.CompletedProcess(command, process.wait(), out, err)


@functools.cache
def _forked() -> Start:
    """Starts commands from a template, which lives as long as this process."""
    kept = contextlib.ExitStack()
    atexit.register(kept.close)
    with pytest.MonkeyPatch.context() as patch:  # a test may have set variables for its own commands
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        return kept.enter_context(template(forked_command.__name__, 1))


def _outputs(process: Process, command: list[str]) -> list[str]:
    """What a process writes to standard output and error until both are closed."""
    pipes = selectors.DefaultSelector()
    said: dict[Any, list[bytes]] = {}
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipes.register(pipe, selectors.EVENT_READ)
        said[pipe] = []
    until = time.monotonic() + TIMEOUT_S
    while pipes.get_map():
        ready = pipes.select(timeout=max(0.0, until - time.monotonic()))
        if not ready:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise subprocess.TimeoutExpired(command, TIMEOUT_S)
        for key, _ in ready:
            chunk = os.read(key.fd, 1 << 16)
            said[key.fileobj].append(chunk)
            if not chunk:
                pipes.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    return [b"".join(chunks).decode() for chunks in said.values()]


def result(*args: Any, cwd: Path, status: int = 0, **env: str) -> dict[str, Any]:
    """The JSON that a command gives."""
    done = weft(*args, *([] if "--json" in args else ["--json", "-"]), cwd=cwd, **env)
    assert done.returncode == status, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def started(folder: Path, *args: Any) -> subprocess.Popen[str]:
    """A run of job.py by two workers into the folder `run`, under way."""
    line = [*WEFT, "train", "job.py", "-n", "2", "--out", "run", *map(str, args)]
    return subprocess.Popen(
        line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def until(condition: Callable[[], Any], within_s: float = 40) -> None:
    """Wait for a condition; fails where it does not come true."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def children_of(folder: Path) -> list[int]:
    """Live processes whose working folder is within a folder: every test has its own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "cwd").startswith(str(folder)):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def gone(folder: Path, within_s: float = 10) -> bool:
    """Whether no process works in a folder any more."""
    end = time.monotonic() + within_s
    while children_of(folder) and time.monotonic() < end:
        time.sleep(0.1)
    return not children_of(folder)


def losses(folder: Path) -> list[float]:
    """The loss of each step in a run folder."""
    return [event["loss"] for event in events(folder)]
