"""Starts the processes of a run: forked from a template on Linux, or as new processes of Python."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import IO, Self, final

from weft.environment import LocalLauncher, UserSettings
from weft.errors import JobError
from weft.runtime.launch.process_groups import Process
from weft.runtime.launch.template import PID

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_START_S = 120.0
"""How long a template may take to import its modules and to fork a process."""


Start = Callable[[Sequence[str], Mapping[str, str], int | None], Process]
"""Starts a process with these arguments and this environment, and the pipe of its progress reports if it has one."""


def start_new(module: str) -> Start:
    """New processes of Python that run a module."""

    def start(args: Sequence[str], env: Mapping[str, str], progress: int | None) -> Process:
        return subprocess.Popen(
            [sys.executable, "-m", module, *args],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[] if progress is None else [progress],
        )

    return start


def at_start(threads: int | str) -> dict[str, str]:
    """Variables that Python and its libraries read when they start."""
    return {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}


def can_fork() -> bool:
    """Whether processes are forked: on Linux, unless `UserSettings.fork` is 0."""
    return sys.platform == "linux" and UserSettings.from_env().fork != "0"


@contextmanager
def template(module: str, threads: int | str) -> Iterator[Start]:
    """Processes that are forked from one which has imported torch, and run `module` with so many threads.

    The template of `starting` is used, and ended with this context, if it runs.
    """
    begun = _STARTED.get()
    with _Template(module, threads) if begun is None or begun.ended else begun as running:

        def start(args: Sequence[str], env: Mapping[str, str], progress: int | None) -> Process:
            request = {"module": module, "threads": str(threads), "argv": [module, *args], "env": dict(env)}
            return running.fork(request, progress)

        yield start


@contextmanager
def starting(module: str, threads: int) -> Iterator[None]:
    """Start a template at once: it imports torch while the launch inside this context is parsed and checked.

    Both arguments are guesses. Another module is imported after the fork, and another number of threads set there.
    """
    if not can_fork():
        yield
        return
    with _Template(module, os.environ.get("OMP_NUM_THREADS", threads)) as begun:
        token = _STARTED.set(begun)
        try:
            yield
        finally:
            _STARTED.reset(token)


@final
class _Template:
    """The process from which others are forked. Its end of a socket stays open until it is told to end."""

    def __init__(self, module: str, threads: int | str) -> None:
        self.ended = False
        self._stack = ExitStack()
        self._stack.enter_context(_subreaper())
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stack.enter_context(self._socket)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weft.runtime.launch.template", str(theirs.fileno()), module],
                env={**os.environ, **at_start(threads), **LocalLauncher(pid=os.getpid()).to_env()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._socket.settimeout(_START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.ended:
            return
        self.ended = True
        with self._stack, self._process:
            self._process.kill()

    def fork(self, request: Mapping[str, object], progress: int | None) -> Forked:
        """A new process, once the modules are imported."""
        try:
            return Forked(self._socket, request, progress)
        except OSError:
            self._process.kill()
            errors = self._process.communicate()[1]
            last = errors.decode(errors="replace").strip().rpartition("\n")[2] or "no answer"
            raise JobError(f"no process could be started: {last}; see `weft doctor`, or set WEFT_FORK=0") from None


_STARTED: ContextVar[_Template | None] = ContextVar("weft_template", default=None)


@final
class Forked:
    """A process that a template has forked for this one, which is its parent."""

    def __init__(self, template: socket.socket, request: Mapping[str, object], progress: int | None) -> None:
        self.returncode: int | None = None
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self.stdout: IO[bytes] | None = os.fdopen(out, "rb", buffering=0)
        self.stderr: IO[bytes] | None = os.fdopen(err, "rb", buffering=0)
        passed = [] if progress is None else [progress]
        try:
            self.pid = _fork(template, {**request, "passed": passed}, [out_end, err_end, *passed])
        except BaseException:
            self.stdout.close()
            self.stderr.close()
            raise
        finally:
            os.close(out_end)
            os.close(err_end)

    def poll(self) -> int | None:
        """The exit status, or minus the number of the signal that has ended the process; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end of the process."""
        status = self._reap(0)
        assert status is not None
        return status

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            except ChildProcessError:  # a signal interrupted an earlier call after it had reaped the process
                self.returncode = 0
        return self.returncode


def _fork(template: socket.socket, request: Mapping[str, object], fds: list[int]) -> int:
    """Ask the template for a process with these files; return its id."""
    with open(os.memfd_create("weft-request"), "w+", encoding="utf-8") as file:
        json.dump(request, file)
        file.flush()
        file.seek(0)
        socket.send_fds(template, [b"+"], [file.fileno(), *fds])
        answer = template.recv(PID.size)
    if len(answer) < PID.size:
        raise ConnectionResetError
    (pid,) = PID.unpack(answer)
    return int(pid)


@contextmanager
def _subreaper() -> Iterator[None]:
    """Processes below this one become its children when their parents end."""
    libc, before = ctypes.CDLL(None), ctypes.c_int(0)
    with suppress(OSError):
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        with suppress(OSError):
            libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)
