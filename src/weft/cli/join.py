"""`weft join`: join a run that was started elsewhere; `weft key`: make the key that this needs."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from weft.cli import app
from weft.cli._command import Command
from weft.environment import LocalLauncher, ProcessPlace, RunOptions
from weft.errors import JobError, PeerLost
from weft.runtime.launch.launcher import find_job
from weft.runtime.launch.network import parse_network
from weft.runtime.launch.process_groups import ended, signal_group
from weft.runtime.launch.rendezvous import reach, take_assignment
from weft.transport.messaging import Key, Stranger

_REPLY_S = 60.0


@app.command(cls=Command)
def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="HOST:PORT of the run: its --rendezvous.")],
    key_file: Annotated[Path, typer.Option(help="The run's key, copied from the machine that started it.")],
    job: Annotated[Path | None, typer.Option(help="Path of the job's script, if it differs on this machine.")] = None,
    network: Annotated[str, typer.Option(help="trusted or untrusted, as for the run itself.")] = "untrusted",
) -> None:
    """Join a run as the worker or server that it waits for."""
    trust, here = parse_network(network), socket.gethostname()
    key = Key.read(key_file)
    try:
        rendezvous = reach(address, key, f"{here}, process {os.getpid()}", encrypted=trust == "untrusted")
        seat = take_assignment(rendezvous, _REPLY_S)
    except Stranger as error:
        raise JobError(f"on {here}: {error}") from None
    except PeerLost as error:
        raise JobError(
            f"no run answers at {address} from {here} ({error}); check that it is up and has the same --network"
        ) from None
    script = find_job(str(job) if job is not None else seat.job)
    place, options = ProcessPlace.from_env(seat.env), RunOptions.from_env(seat.env)
    role = f"worker {place.rank}" if place.server is None else f"server {place.server}"
    typer.echo(f"{here} is {role} of {script.stem}, {options.strategy}")
    typer.echo(f"runs {shlex.join([str(script.absolute()), *seat.args])}")
    env = os.environ | seat.env | ProcessPlace(rendezvous=address, network=trust).to_env()
    env |= LocalLauncher(pid=os.getpid(), key_file=key_file.absolute()).to_env()
    command = [sys.executable, "-m", "weft.runtime.launch.child", str(script), *seat.args]
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while not ended(process):
            time.sleep(0.05)
    finally:
        signal_group(process, signal.SIGKILL)
        process.wait()
        rendezvous.close()
    if process.returncode:
        raise typer.Exit(1 if process.returncode < 0 else process.returncode)


@app.command(cls=Command)
def key(file: Annotated[Path, typer.Argument(help="A new file; copy it to every machine of the run.")]) -> None:
    """Make the key of a run on several machines.

    Any process that has it can join the run.
    """
    Key.make(file)
    typer.echo(f"{file}: copy it to every machine of the run, and pass it there with --key-file")
