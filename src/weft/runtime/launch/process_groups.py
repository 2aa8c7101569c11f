"""Process groups: everything that a process of a run has started ends with the launcher.

Each process of a run leads its own process group. The child's side imports nothing heavy, since it runs before
`import torch`: a launcher may be killed while its processes still start.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress
from typing import IO, Protocol

from weft.environment import LocalLauncher

TERMINATED = 128 + signal.SIGTERM
"""The exit status of a run that was asked to terminate and was saved."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class Process(Protocol):
    """The part of `subprocess.Popen` that supervision needs."""

    pid: int
    returncode: int | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux; elsewhere a parent must do it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_launcher() -> None:
    """Die with the parent, even on SIGKILL, and at once if it is not the launcher: then the launcher has ended."""
    die_with_parent()
    if sys.platform == "linux" and LocalLauncher.from_env().pid not in (None, os.getppid()):
        os._exit(1)


def name_process(name: str) -> None:
    """The name of this process in `ps` and `top` (Linux; the first 15 characters)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def end_group_with_parent() -> None:
    """End the rest of this process group with the parent too: children do not inherit the death signal.

    A small process waits for the parent's end. It belongs to the group, so the group's id cannot be reused meanwhile.
    """
    if sys.platform != "linux" or os.getpgrp() != os.getpid() or os.getppid() == 0:
        return  # not the group's leader, or a parent outside of this PID namespace, which ends with its first process
    try:
        parent = os.pidfd_open(os.getppid())
    except (AttributeError, OSError):
        return  # an old kernel; this process itself still ends with its parent
    between = os.fork()
    if between:
        os.close(parent)
        os.waitpid(between, 0)
    elif os.fork():  # a double fork, so that the job has no child that it did not start
        os._exit(0)
    else:
        _watch(parent)


def _watch(parent: int) -> None:
    """Wait for the end of a process, then end this process group."""
    try:
        name_process("weft-watch")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.closerange(0, parent)
        os.closerange(parent + 1, os.sysconf("SC_OPEN_MAX"))
        waiting = select.poll()
        waiting.register(parent, select.POLLIN)
        waiting.poll()
        os.kill(0, signal.SIGKILL)
    finally:
        os._exit(1)


def ended(process: Process) -> bool:
    """Whether a process has ended. The rest of its group is ended before its id is released."""
    if process.returncode is None and sys.platform == "linux":
        with suppress(ChildProcessError):  # a signal handler may have reaped it in between
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            signal_group(process, signal.SIGKILL)
    return process.poll() is not None


def signal_group(process: Process, number: signal.Signals) -> None:
    """Signal a process and everything that it started, unless it has been reaped: its id may have been reused."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):  # already ended
            os.killpg(process.pid, number)
