"""Supervision of a run's processes: relay their output, notice failures, pass on termination, and end them all."""

from __future__ import annotations

import json
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from weft.errors import WeftError
from weft.runtime.launch.process_groups import TERMINATED, Process, ended, signal_group

if TYPE_CHECKING:
    from weft.runtime.launch.rendezvous import Rendezvous

_GRACE_S = 2.0
_SAME_S = 0.5
"""A second signal within this time is the first one: `timeout` sends one to a command and one to its group."""

_DRAIN_S = 1.0


_AFTER_CLOSE_S = 0.002
"""A process ends within moments after its pipes are closed."""
_LONGEST_LINE = 1 << 16


class JobFailedError(WeftError):
    """A process of the run failed: its message, its own traceback, and the exit status of the launcher."""

    def __init__(self, message: str, traceback: str, status: int) -> None:
        super().__init__(message)
        self.traceback, self.status = traceback, status


class Terminated(WeftError):
    """The run was stopped by a signal to the launcher: SIGTERM, or SIGINT as Ctrl-C sends it."""

    def __init__(self, message: str, number: signal.Signals, *, saved: bool = False) -> None:
        super().__init__(message)
        self.number, self.saved = number, saved
        """`saved`: whether the run was saved when it was stopped."""


@dataclass
class Child:
    rank: int
    process: Process
    server: bool = False
    missed: bool = False
    """Whether its loss was reported while the others continue."""
    rest: dict[int, bytes] = field(default_factory=dict)
    """By pipe: the beginning of an incomplete line."""
    ended: bool = False
    """Whether its end was noticed."""

    def over(self) -> bool:
        """Whether it has ended, and with it everything that it started."""
        self.ended = self.ended or ended(self.process)
        return self.ended


def attend(
    children: list[Child],
    progress: IO[bytes],
    on_line: Callable[[int, str], None],
    on_progress: Callable[[dict[str, Any]], None],
    survives_worker_loss: bool,
    rendezvous_address: Rendezvous | None,
) -> None:
    """Relay output until every process has ended, or one has failed that the others need."""
    pipes = selectors.DefaultSelector()
    told = b""
    pipes.register(progress, selectors.EVENT_READ, None)
    for child in children:
        for pipe in (child.process.stdout, child.process.stderr):
            assert pipe is not None
            pipes.register(pipe, selectors.EVENT_READ, child)
    closed = False
    while not all(child.over() for child in children):
        events, closed = pipes.select(timeout=_AFTER_CLOSE_S if closed else 0.1), False
        for key, _ in events:
            chunk = os.read(key.fd, 65536)
            speaker: Child | None = key.data
            if not chunk:
                pipes.unregister(key.fileobj)
                closed = True
            if speaker is None:
                told = _tell(told + chunk, on_progress)
            else:
                _relay(speaker, key.fd, chunk, on_line)
        failed = [child for child in children if child.over() and child.process.returncode not in (0, TERMINATED)]
        if survives_worker_loss and any(
            child.process.returncode in (None, 0) for child in children if not child.server
        ):
            for child in failed:
                if not child.server and not child.missed:
                    child.missed = True
                    on_line(child.rank, f"worker {child.rank} {_how(child)}; the others continue")
                    if rendezvous_address is not None:
                        rendezvous_address.vacate(child.rank)
            failed = [child for child in failed if child.server]
        if failed:
            time.sleep(0.3)  # failures that follow from a lost peer appear within moments
            break
    while any(key.data is None for key, _ in pipes.select(timeout=0)):  # the last steps of a run that has just ended
        chunk = os.read(progress.fileno(), 65536)
        if not chunk:
            break
        told = _tell(told + chunk, on_progress)
    _drain(children, pipes, on_line)


def _tell(text: bytes, on_progress: Callable[[dict[str, Any]], None]) -> bytes:
    """Report every whole line of progress; returns the beginning of the next one."""
    *lines, rest = text.split(b"\n")
    for line in lines:
        on_progress(json.loads(line))
    return rest


@contextmanager
def passing_on_termination(children: list[Child], grace_s: float) -> Iterator[list[signal.Signals]]:
    """On SIGTERM or SIGINT, ask every process to save and exit within the grace period; a second one ends the run.

    The value holds the signal, if there was one.
    """
    requested: list[signal.Signals] = []
    if not grace_s or threading.current_thread() is not threading.main_thread():
        yield requested
        return
    since = 0.0

    def ask(number: int, _: Any) -> None:
        nonlocal since
        if requested:
            if time.monotonic() - since < _SAME_S:
                return
            raise Terminated(f"a second {signal.Signals(number).name} ended it at once", requested[0])
        requested.append(signal.Signals(number))
        since = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, grace_s)
        for child in children:
            if child.process.returncode is None and not child.server:  # servers exit when all workers have
                with suppress(ProcessLookupError):
                    os.kill(child.process.pid, signal.SIGTERM)

    def over(*_: Any) -> None:
        raise Terminated(f"it was not saved within {grace_s:g} s; allow more with --grace", requested[0])

    handlers = {signal.SIGTERM: ask, signal.SIGINT: ask, signal.SIGALRM: over}
    usual = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield requested
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in usual.items():
            signal.signal(number, handler)


def _drain(children: list[Child], pipes: selectors.BaseSelector, on_line: Callable[[int, str], None]) -> None:
    """Relay the remaining output of processes that have ended.

    Their groups have ended as well. A process that left its group may keep a pipe open; it is not waited for.
    """
    over = {child.rank for child in children if child.over()}
    for key in list(pipes.get_map().values()):
        if key.data is None or key.data.rank not in over:
            pipes.unregister(key.fileobj)
    until = time.monotonic() + _DRAIN_S
    while pipes.get_map() and (left := until - time.monotonic()) > 0:
        for key, _ in pipes.select(timeout=left):
            chunk = os.read(key.fd, 65536)
            if not chunk:
                pipes.unregister(key.fileobj)
            _relay(key.data, key.fd, chunk, on_line)
    for key in pipes.get_map().values():
        _relay(key.data, key.fd, b"", on_line)


def _relay(child: Child, fd: int, chunk: bytes, on_line: Callable[[int, str], None]) -> None:
    """Relay every complete line as a terminal would finally show it: a carriage return goes back to its start.

    An empty chunk is the end. Overwritten text of a progress bar is dropped, and a very long line is cut.
    """
    *lines, rest = (child.rest.get(fd, b"") + chunk).split(b"\n")
    rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
    while len(rest) > _LONGEST_LINE or (rest and not chunk):
        lines.append(rest[:_LONGEST_LINE])
        rest = rest[_LONGEST_LINE:]
    child.rest[fd] = rest
    for line in lines:
        on_line(child.rank, line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))


def _how(child: Child) -> str:
    """How a process ended, in words."""
    status = child.process.returncode or 0
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def raise_first_failure(children: list[Child], folder: Path) -> None:
    """Raise the failure of the first process; a lost peer is a consequence, never the cause."""
    words = {}
    for child in children:
        status = child.process.returncode if child.over() else None
        file = folder / f"{child.rank}.json"
        if file.exists():
            words[child.rank] = json.loads(file.read_text(encoding="utf-8"))
        elif status:
            words[child.rank] = {"kind": "Death", "message": _how(child), "traceback": "", "user": False, "time": 0.0}
    if not words:
        return
    rank = min(words, key=lambda rank: (words[rank]["kind"] == "PeerLost", words[rank]["time"]))
    word = words[rank]
    if word["kind"] == "PeerLost" and (early := _ended_well(children)):
        raise JobFailedError(
            f"worker process {early[0]} left run.shard before the others; let all workers take as many steps", "", 1
        )
    text = word["message"] if word["user"] else f"process {rank} of the run failed: {word['kind']}: {word['message']}"
    if word["kind"] == "Death":
        text = f"process {rank} of the run {word['message']}; the others were stopped"
    raise JobFailedError(text, word["traceback"], 2 if word["user"] else 1)


def _ended_well(children: list[Child]) -> list[int]:
    """The ranks of processes with workers that have ended without a failure; leaving a run takes them a moment."""
    workers = [child for child in children if not child.server]
    until = time.monotonic() + _GRACE_S
    while not all(child.over() for child in workers) and time.monotonic() < until:
        time.sleep(0.02)
    return [child.rank for child in workers if child.over() and child.process.returncode == 0]


def end_all(children: list[Child]) -> None:
    """Send SIGTERM, wait, then send SIGKILL. Servers have nothing to save and are killed at once."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            if not child.over():
                signal_group(child.process, signal.SIGKILL if child.server else number)
                signal_group(child.process, signal.SIGCONT)  # a stopped process handles SIGTERM only then
        until = time.monotonic() + _GRACE_S
        while not all(child.over() for child in children) and time.monotonic() < until:
            time.sleep(0.02)
    for child in children:
        child.process.wait()
        for pipe in (child.process.stdout, child.process.stderr):
            if pipe is not None:
                pipe.close()
