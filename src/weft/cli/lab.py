"""`weft lab`: an emulated cluster for interactive use."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

from weft.cli import app
from weft.cli._cluster import BandwidthOption, LinkOption, parse_links
from weft.cli._command import Command
from weft.cli._show import JsonOption, console, emit, table
from weft.errors import JobError, UserError
from weft.lab import control_socket
from weft.lab.cluster import Cluster
from weft.units import Bandwidth

lab = typer.Typer(help="Emulate a cluster on this machine, without root.", rich_markup_mode=None)
app.add_typer(lab, name="lab")

NameOption = Annotated[str, typer.Option(help="Name of the lab, if there are several.")]


@lab.command(cls=Command)
def up(
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    bandwidth: BandwidthOption = "1gbit",
    link: LinkOption = None,
    name: NameOption = "lab",
    json: JsonOption = None,
) -> None:
    """Start a cluster. It runs until `weft lab down`, or until this machine restarts."""
    if not name or len(name) > 40 or not name.replace("-", "").isalnum():
        raise UserError(f"--name is '{name}', but must be up to 40 letters, digits and hyphens")
    cluster = Cluster(hosts, bandwidth, parse_links(link), name=name)
    cluster.up()
    try:
        if hosts > 1:
            cluster.check_rates()
    except BaseException:
        _end(name)
        raise
    rows = [each.row() | {"address": address} for each, address in zip(cluster.links, _addresses(name), strict=True)]
    emit({"name": name, "rows": rows}, json)
    shown = []
    for row in rows:
        measured = [f"{row[key] / 1e6:.0f}" if row[key] else "" for key in ("up_bit_s", "down_bit_s")]
        shown.append([row["host"], row["address"], str(Bandwidth(row["asked_bit_s"])), *measured])
    table(console(json), ["host", "address", "link", "up Mbit/s", "down Mbit/s"], shown)
    console(json).print("\nweft lab exec 0 -- ip addr        weft lab down")


@lab.command(cls=Command, context_settings={"ignore_unknown_options": True})
def exec(  # the command's name
    host: Annotated[int, typer.Argument(help="Number of the host, from 0.")],
    command: Annotated[list[str] | None, typer.Argument(help="Command to run; a shell by default.")] = None,
    name: NameOption = "lab",
) -> None:
    """Run a command on a host of the cluster."""
    with control_socket.connect(name) as end:
        count = len(control_socket.ask(end, do="describe")["addresses"])
    if not 0 <= host < count:
        raise UserError(f"there is no host {host}; hosts are numbered 0 to {count - 1}")
    words = command or [os.environ.get("SHELL", "/bin/sh")]
    done = subprocess.run([sys.executable, "-m", "weft.lab.exec_on_host", name, str(host), "-", *words], check=False)
    raise typer.Exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


@lab.command(cls=Command)
def down(name: NameOption = "lab") -> None:
    """Stop a cluster and every process on its hosts."""
    _end(name)


def _addresses(name: str) -> list[str]:
    with control_socket.connect(name) as end:
        return list(control_socket.ask(end, do="describe")["addresses"])


def _end(name: str) -> None:
    """End the cluster's process, and wait until its socket is gone: with it everything is gone."""
    with control_socket.connect(name) as end:
        control_socket.send(end, {"do": "end"})
        while end.recv(4096):
            pass
    for _ in range(500):
        try:
            control_socket.connect(name).close()
        except JobError:
            return
    raise JobError(f"the lab '{name}' does not end; its process hangs")
