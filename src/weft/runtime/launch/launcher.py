"""Starts the processes of a run on this machine, relays their output, and ends all of them when one fails.

Nothing is left behind: no process (they die with the launcher, even on SIGKILL), no port, no temporary file.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from weft import jobs
from weft.errors import JobError, UserError, WeftError, nearest
from weft.runtime.launch.process_groups import TERMINATED, ended, signal_group
from weft.runtime.launch.rendezvous import Rendezvous, parse_address
from weft.runtime.launch.world import check_network
from weft.store.checkpoint import Policy
from weft.strategy import Strategy
from weft.transport.messaging import Key

_GRACE_S = 2.0
_DRAIN_S = 1.0
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Seat:
    """The place of one process, if not on this machine itself: a command prefix and its environment."""

    enter: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The options of a run: job, processes, strategy and machines."""

    job: str
    args: tuple[str, ...] = ()
    workers: int = 1
    processes: int | None = None
    """The total number of processes that carry the workers; None: one per worker."""
    servers: int = 0
    """The number of additional processes that keep the model, if the strategy has servers."""
    survives_worker_loss: bool = False
    """Whether the other workers continue if one dies, because no step needs all of them."""
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""
    key_file: Path | None = None
    """The key with which processes on several machines authenticate; a run on one machine makes its own."""
    external_ranks: int = 0
    """The number of processes, the highest ranks, that are started elsewhere with `weft join`."""
    network: str = "untrusted"
    """The network between the nodes: `trusted` or `untrusted`."""
    strategy: Strategy | None = None
    steps: int | None = None
    seed: int | None = None
    device: str = "auto"
    out: Path | None = None
    trace: bool = False
    share_gpus: bool = False
    policy: Policy | None = None
    """When to save and which checkpoints to keep; None: the job decides."""
    resume: Path | None = None
    """The checkpoint to resume from."""
    grace_s: float = 0.0
    """Time for the processes to save and exit when the launcher is asked to terminate."""
    seats: tuple[Seat, ...] = ()
    """One for each process, servers last, if they are on emulated hosts; empty: all on this machine."""
    module: str = "weft.runtime.launch.child"
    """The module that each process runs, with the job and its arguments."""

    @property
    def count(self) -> int:
        """The number of processes that carry workers."""
        return self.processes if self.processes is not None else self.workers

    def checked(self) -> Launch:
        """Return self, or raise UserError or JobError with one sentence."""
        count = self.count
        if self.workers < 1:
            raise UserError(f"-n is {self.workers}, but a run has at least one worker")
        if not 1 <= count <= self.workers:
            raise UserError(f"--processes is {count}, but must lie between 1 and the {self.workers} workers")
        if self.steps is not None and self.steps < 1:
            raise UserError(f"--steps is {self.steps}, but a run takes at least one step")
        if self.nodes < 1 or not 0 <= self.node_rank < self.nodes:
            raise UserError(f"--node-rank is {self.node_rank}, but must lie between 0 and {self.nodes - 1}")
        if self.nodes > 1 and not self.rendezvous:
            raise UserError("--nodes needs --rendezvous HOST:PORT, an address of node 0 that all nodes reach")
        if self.network not in ("trusted", "untrusted"):
            raise UserError(f"--network is '{self.network}', but must be trusted or untrusted")
        if self.servers and count < self.workers:
            raise UserError("with parameter servers there is a process for each worker; omit --processes")
        self._check_meeting()
        host = self.rendezvous.rpartition(":")[0]
        if self.nodes > 1 and host and self.network != "trusted" and not self.servers:
            check_network(host)
        if (count + self.servers) % self.nodes:
            what = f"{count} processes" + f" and {self.servers} servers" * bool(self.servers)
            raise UserError(f"{what} cannot be divided among {self.nodes} nodes; choose a multiple")
        gpus = torch.cuda.device_count() if self.device != "cpu" and torch.cuda.is_available() else 0
        here = -(-count // self.nodes)
        if self.device == "cuda" and not gpus:
            raise JobError("--device cuda, but PyTorch sees no GPU; use --device cpu, or see `weft doctor`")
        if gpus and here > gpus and not self.share_gpus:
            raise JobError(
                f"{here} workers, but {gpus} GPU{'s' * (gpus > 1)} here; use -n {gpus}, --device cpu, "
                "or --share-gpus (with Gloo, for experiments)"
            )
        return self

    def _check_meeting(self) -> None:
        """Check the options for servers on several machines, and for `weft join`."""
        apart = self.servers and (self.nodes > 1 or self.rendezvous or self.external_ranks)
        if self.external_ranks and not (self.servers and self.rendezvous):
            raise UserError("--join needs parameter servers and --rendezvous HOST:PORT, which others connect to")
        if not 0 <= self.external_ranks < self.workers + self.servers:
            raise UserError(f"--join is {self.external_ranks}, but at least one process must be started here")
        if apart and self.key_file is None:
            raise UserError(
                "parameter servers on several machines need --key-file F, the same on all of them; make one with "
                "`weft key F` and copy it"
            )
        if apart:
            parse_address(self.rendezvous)
            Key.read(self.key_file or Path())

    @property
    def rendezvous_address(self) -> str:
        """The address of the rendezvous; empty if a folder on this machine serves instead."""
        return self.rendezvous if self.servers and self.rendezvous else ""


def find_job(name: str) -> Path:
    """The script of a bundled job or a path; it must exist and parse."""
    path = jobs.path(name) or Path(name)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise JobError(
            f"the job {name} {what}; give a script, or a bundled job: {', '.join(jobs.names())}{_meant(name)}"
        )
    try:
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
    except SyntaxError as error:
        raise JobError(f"the job {name} does not parse: line {error.lineno}: {error.msg}; fix it first") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise JobError(f"the job {name} cannot be read: {error}; give a Python script") from None
    return path


def _meant(name: str) -> str:
    hint = nearest(name, jobs.names())
    return hint if "did you mean" in hint else ""


class JobFailedError(WeftError):
    """A process of the run failed: its message, its own traceback, and the exit status of the launcher."""

    def __init__(self, message: str, traceback: str, status: int) -> None:
        super().__init__(message)
        self.traceback, self.status = traceback, status


class Terminated(WeftError):
    """The launcher was asked to terminate, and the run ended with it."""


@dataclass
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
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


def launch(spec: Launch, on_line: Callable[[int, str], None], on_progress: Callable[[dict[str, Any]], None]) -> None:
    """Run a job to its end. Raises JobFailedError with the traceback of the first process that failed."""
    job = find_job(spec.job)
    with (
        _scratch() as folder,
        _ended() as children,
        _meeting_point(spec, folder) as meeting,
        _rendezvous(spec, job, on_line) as rendezvous_address,
    ):
        progress, progress_in = os.pipe()
        try:
            for child in _start(spec, job, folder, meeting, progress_in):
                children.append(child)
        finally:
            os.close(progress_in)
        with os.fdopen(progress, "rb", buffering=0) as pipe, _asked_to_leave(children, spec.grace_s) as asked:
            _attend(children, pipe, on_line, on_progress, spec.survives_worker_loss, rendezvous_address)
        if asked.is_set():
            saved = all(child.process.returncode in (0, TERMINATED) for child in children)
            raise Terminated("stopped, after it was saved" if saved else "stopped, before it could be saved")
        failed = [child for child in children if child.process.returncode != 0]
        if spec.survives_worker_loss and len(failed) < spec.workers and not any(child.server for child in failed):
            return  # some workers were lost, but the others reached the end
        _judge(children, folder)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A locked temporary folder. Folders whose launcher was killed are removed by the next launch."""
    folder = Path(tempfile.mkdtemp(prefix="weft-"))
    try:
        with (folder / "held").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "held").rename(folder / "lock")
            for left in folder.parent.glob("weft-*/lock"):
                with suppress(OSError), os.fdopen(os.open(left, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)) as other:
                    about = os.fstat(other.fileno())
                    if stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid():  # not another user's, and no pipe
                        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(left.parent, ignore_errors=True)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _ended() -> Iterator[list[_Child]]:
    """A list of processes that are all ended on exit."""
    children: list[_Child] = []
    try:
        yield children
    finally:
        _end(children)


def _start(spec: Launch, job: Path, folder: Path, meeting: dict[str, str], progress: int) -> Iterator[_Child]:
    here = (spec.count + spec.servers) // spec.nodes - spec.external_ranks
    threads = max(1, (os.cpu_count() or 1) // here)
    key_file = spec.key_file.absolute() if spec.key_file else None
    if spec.servers and key_file is None:
        key_file = Key.make(folder / "key").file
    for local in range(here):
        rank = spec.node_rank * ((spec.count + spec.servers) // spec.nodes) + local
        env = {**os.environ, **meeting, "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(min(here, spec.count))}
        env |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
        env |= {"WEFT_LAUNCHER": str(os.getpid()), "WEFT_WORD": str(folder)}
        said = _said(spec, job, rank) | {
            "WEFT_PROGRESS_FD": progress if rank == 0 else None,
            "WEFT_KEY_FILE": key_file,
            "WEFT_MEETING": folder if spec.nodes == 1 and not spec.rendezvous_address else None,
        }
        for key, value in said.items():
            env.pop(key, None)
            if value is not None:
                env[key] = str(value)
        command = [sys.executable, "-m", spec.module, str(job), *spec.args]
        if spec.seats:
            command = [*spec.seats[local].enter, *command]
            env |= spec.seats[local].env
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[progress] if rank == 0 else [],
        )
        yield _Child(rank, process, rank >= spec.count)


def _said(spec: Launch, job: Path, rank: int) -> dict[str, Any]:
    """The environment that tells a process about the run and its place in it, on any machine."""
    return {
        "RANK": rank,
        "WORLD_SIZE": spec.count,
        "WEFT_WORKERS": spec.workers,
        "WEFT_DEVICE": spec.device,
        "WEFT_CLI_STRATEGY": str(spec.strategy) if spec.strategy else None,
        "WEFT_STEPS": spec.steps,
        "WEFT_SEED": spec.seed,
        "WEFT_OUT": spec.out,
        "WEFT_TRACE": "1" if spec.trace else None,
        "WEFT_JOB": job,
        "WEFT_NETWORK": spec.network if spec.nodes > 1 or spec.rendezvous_address else None,
        "WEFT_RESUME": spec.resume,
        "WEFT_SAVE_EVERY": spec.policy.every if spec.policy else None,
        "WEFT_KEEP_LAST": spec.policy.last if spec.policy else None,
        "WEFT_KEEP_EVERY": spec.policy.milestone if spec.policy else None,
        "WEFT_SHARE_GPUS": "1" if spec.share_gpus else None,
        "WEFT_SERVER": rank - spec.count if rank >= spec.count else None,
        "WEFT_RENDEZVOUS": spec.rendezvous_address or None,
    }


def _seat(spec: Launch, job: Path, rank: int) -> dict[str, Any]:
    """The same for a joining process: the job by name or path, and nothing that is specific to this machine."""
    known = _said(replace(spec, out=spec.out.absolute() if spec.out else None), job, rank)
    env = {key: str(value) for key, value in known.items() if value is not None}
    env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WEFT_CLI_STRATEGY": str(spec.strategy)}
    return {"job": spec.job if jobs.path(spec.job) else str(job.absolute()), "args": list(spec.args), "env": env}


@contextmanager
def _rendezvous(spec: Launch, job: Path, on_line: Callable[[int, str], None]) -> Iterator[Rendezvous | None]:
    """The rendezvous of the run, if it has one and this machine hosts it."""
    if not spec.rendezvous_address or spec.node_rank > 0:
        yield None
        return
    host, port = parse_address(spec.rendezvous_address)
    total = spec.count + spec.servers
    try:
        rendezvous_address = Rendezvous(
            (host, port),
            Key.read(spec.key_file or Path()),
            encrypted=spec.network != "trusted",
            vacant=range(total - spec.external_ranks, total),
            seat=lambda rank: _seat(spec, job, rank),
            said=lambda text: on_line(0, text),
        )
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    try:
        yield rendezvous_address
    finally:
        rendezvous_address.close()


@contextmanager
def _meeting_point(spec: Launch, folder: Path) -> Iterator[dict[str, str]]:
    """The rendezvous for torch.distributed: a file on one machine, a TCP store at the given address on several."""
    if spec.nodes == 1 or spec.rendezvous_address:
        yield {"WEFT_STORE": str(folder / "store") if not spec.rendezvous_address else ""}
        return
    host, _, port = spec.rendezvous.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--rendezvous is '{spec.rendezvous}', but must be HOST:PORT, as in 10.0.0.1:29500")
    there = {"MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True", "WEFT_STORE": ""}
    if spec.node_rank > 0:
        yield there
        return
    with _listening(host, int(port)) as listener:
        store = TCPStore(host, int(port), is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        yield there
        del store


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> JobError:
    remedy = "another port" if "in use" in str(error) else "an address of this machine"
    return JobError(f"cannot listen on {host}:{port}: {error.strerror or error}; give --rendezvous {remedy}")


def _attend(
    children: list[_Child],
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
    while not all(child.over() for child in children):
        for key, _ in pipes.select(timeout=0.1):
            chunk = os.read(key.fd, 65536)
            speaker: _Child | None = key.data
            if not chunk:
                pipes.unregister(key.fileobj)
            if speaker is None:
                *lines, told = (told + chunk).split(b"\n")
                for line in lines:
                    on_progress(json.loads(line))
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
    _drain(children, pipes, on_line)


@contextmanager
def _asked_to_leave(children: list[_Child], grace_s: float) -> Iterator[threading.Event]:
    """On SIGTERM, ask every process to save and exit within the grace period; a second SIGTERM ends the run at once."""
    asked = threading.Event()
    if not grace_s or threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(*_: Any) -> None:
        if asked.is_set():
            raise Terminated("stopped at once by a second SIGTERM")
        asked.set()
        signal.setitimer(signal.ITIMER_REAL, grace_s)
        for child in children:
            if child.process.returncode is None and not child.server:  # servers exit when all workers have
                with suppress(ProcessLookupError):
                    os.kill(child.process.pid, signal.SIGTERM)

    def over(*_: Any) -> None:
        raise Terminated(f"stopped, because it was not saved within {grace_s:g} s; allow more with --grace")

    usual, timer = signal.signal(signal.SIGTERM, ask), signal.signal(signal.SIGALRM, over)
    try:
        yield asked
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, usual)
        signal.signal(signal.SIGALRM, timer)


def _drain(children: list[_Child], pipes: selectors.BaseSelector, on_line: Callable[[int, str], None]) -> None:
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


def _relay(child: _Child, fd: int, chunk: bytes, on_line: Callable[[int, str], None]) -> None:
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


def _how(child: _Child) -> str:
    """How a process ended, in words."""
    status = child.process.returncode or 0
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def _judge(children: list[_Child], folder: Path) -> None:
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
    text = word["message"] if word["user"] else f"process {rank} of the run failed: {word['kind']}: {word['message']}"
    if word["kind"] == "Death":
        text = f"process {rank} of the run {word['message']}; the others were stopped"
    raise JobFailedError(text, word["traceback"], 2 if word["user"] else 1)


def _end(children: list[_Child]) -> None:
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
