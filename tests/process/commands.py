"""The command line in a process of its own, and the processes that it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.runtime.record.run_folder import events

WEFT = [sys.executable, "-m", "weft.cli"]
Command = Callable[..., subprocess.CompletedProcess[str]]
"""The fixture `weft`."""
Job = Callable[..., Path]
"""The fixture `job`."""


def weft(*args: Any, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [*WEFT, *map(str, args)]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=120, check=False
    )


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
