"""Starts the processes of a run on this machine, relays their output, and ends all of them when one fails.

Nothing is left behind: no process (they die with the launcher, even on SIGKILL), no port, no temporary file.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft import jobs
from weft.environment import LocalLauncher, ProcessPlace, RunOptions
from weft.errors import JobError, nearest
from weft.runtime.launch.process_groups import TERMINATED
from weft.runtime.launch.rendezvous import Rendezvous
from weft.runtime.launch.spec import Launch
from weft.runtime.launch.start import Start, at_start, can_fork, start_new, template
from weft.runtime.launch.supervise import (
    Child,
    Terminated,
    attend,
    end_all,
    passing_on_termination,
    raise_first_failure,
)
from weft.transport.messaging import Key
from weft.transport.tcp import format_address, parse_address


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


def launch(
    spec: Launch,
    on_line: Callable[[int, str], None],
    on_progress: Callable[[dict[str, Any]], None],
    start: Start | None = None,
) -> None:
    """Run a job to its end. Raises JobFailedError with the traceback of the first process that failed.

    `start` is a template's, for several launches in turn; without it, the launch has its own.
    """
    job = find_job(spec.job)
    with (
        _scratch() as folder,
        _ended() as children,
        _meeting_point(spec, folder) as meeting,
        _rendezvous(spec, job, on_line) as rendezvous_address,
    ):
        progress, progress_in = os.pipe()
        try:
            with nullcontext(start) if start is not None else _starter(spec) as started_by:
                for child in _start(spec, job, folder, meeting, progress_in, started_by):
                    children.append(child)
        finally:
            os.close(progress_in)
        with (
            os.fdopen(progress, "rb", buffering=0) as pipe,
            passing_on_termination(children, spec.grace_s) as requested,
        ):
            attend(children, pipe, on_line, on_progress, spec.survives_worker_loss, rendezvous_address)
        if requested:
            saved = all(child.process.returncode in (0, TERMINATED) for child in children)
            raise Terminated("its processes ended before they had saved", requested[0], saved=saved)
        failed = [child for child in children if child.process.returncode != 0]
        if spec.survives_worker_loss and len(failed) < spec.workers and not any(child.server for child in failed):
            return  # some workers were lost, but the others reached the end
        raise_first_failure(children, folder)


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
def _ended() -> Iterator[list[Child]]:
    """A list of processes that are all ended on exit."""
    children: list[Child] = []
    try:
        yield children
    finally:
        end_all(children)


@contextmanager
def _starter(spec: Launch) -> Iterator[Start]:
    """How processes on this machine are started: forked from one that has imported torch, where that is possible."""
    if not can_fork():
        yield start_new(spec.module)
        return
    with template(spec.module, _threads(spec)) as start:
        yield start


def _here(spec: Launch) -> int:
    """The number of processes of the run on this machine."""
    return (spec.count + spec.servers) // spec.nodes - spec.external_ranks


def _threads(spec: Launch) -> str:
    """The number of compute threads of each process: its share of the cores, unless it is set."""
    share = str(max(1, (os.cpu_count() or 1) // _here(spec)))
    return {"OMP_NUM_THREADS": share, **os.environ, **(spec.seats[0].env if spec.seats else {})}["OMP_NUM_THREADS"]


def _start(
    spec: Launch, job: Path, folder: Path, meeting: dict[str, str], progress: int, start: Start
) -> Iterator[Child]:
    here = _here(spec)
    key_file = spec.key_file.absolute() if spec.key_file else None
    if spec.servers and key_file is None:
        key_file = Key.make(folder / "key").file
    inherited = {key: value for key, value in os.environ.items() if key not in _SET_BY_LAUNCHER}
    for local in range(here):
        rank = spec.node_rank * ((spec.count + spec.servers) // spec.nodes) + local
        local_place = ProcessPlace(local_rank=local, local_world_size=min(here, spec.count))
        launcher = LocalLauncher(
            pid=os.getpid(),
            failures=folder,
            progress_fd=progress if rank == 0 else None,
            server_addresses=folder if spec.nodes == 1 and not spec.rendezvous_address else None,
            key_file=key_file,
        )
        env = inherited | meeting | _told(spec, job, rank) | local_place.to_env() | launcher.to_env()
        env |= at_start(_threads(spec))
        if spec.seats:
            env |= spec.seats[local].env
        process = start([str(job), *spec.args], env, progress if rank == 0 else None)
        yield Child(rank, process, rank >= spec.count)


_SET_BY_LAUNCHER = {name for group in (ProcessPlace, RunOptions, LocalLauncher) for name in group.names().values()}


def _told(spec: Launch, job: Path, rank: int) -> dict[str, str]:
    """The environment that tells a process about the run and its place in it, on any machine."""
    place = ProcessPlace(
        rank=rank,
        world_size=spec.count,
        workers=spec.workers,
        server=rank - spec.count if rank >= spec.count else None,
        rendezvous=spec.rendezvous_address or None,
        network=spec.network if spec.nodes > 1 or spec.rendezvous_address else None,
        share_gpus=spec.share_gpus,
    )
    options = RunOptions(
        job=job,
        strategy=str(spec.strategy) if spec.strategy else None,
        strategy_source=spec.strategy_source if spec.strategy else None,
        steps=spec.steps,
        seed=spec.seed,
        device=spec.device,
        out=spec.out,
        trace=spec.trace,
        resume=spec.resume,
        save_every=spec.policy.every if spec.policy else None,
        keep_last=spec.policy.last if spec.policy else None,
        keep_every=spec.policy.milestone if spec.policy else None,
    )
    return place.to_env() | options.to_env()


def _seat(spec: Launch, job: Path, rank: int) -> dict[str, Any]:
    """The same for a joining process: the job by name or path, and nothing that is specific to this machine."""
    env = _told(replace(spec, out=spec.out.absolute() if spec.out else None), job, rank)
    env |= ProcessPlace(local_rank=0, local_world_size=1).to_env() | RunOptions(strategy=str(spec.strategy)).to_env()
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
        yield LocalLauncher(store=str(folder / "store") if not spec.rendezvous_address else "").to_env()
        return
    host, port = parse_address(spec.rendezvous)
    there = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    there |= LocalLauncher(store="").to_env()
    if spec.node_rank > 0:
        yield there
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with _listening(host, port) as listener:
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
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
    return JobError(
        f"cannot listen on {format_address((host, port))}: {error.strerror or error}; give --rendezvous {remedy}"
    )
