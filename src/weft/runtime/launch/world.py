"""Where this process stands: what a launcher (weft, torchrun, Slurm through either) has put into the environment."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from weft.errors import JobError, PeerLost, UserError
from weft.runtime.launch.rendezvous import ask_where, reach, say_here
from weft.strategy import Strategy
from weft.topology import Topology
from weft.transport.heartbeat import peer_timeout_s
from weft.transport.layout import Layout
from weft.transport.mesh import Mesh
from weft.transport.messaging import Client, Key
from weft.transport.tcp import format_address, parse_address

_RENDEZVOUS_S = 60.0


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all, and the logical workers that they carry."""

    process: int = 0
    processes: int = 1
    local_process: int = 0
    workers: int = 1
    store: str = ""
    """A rendezvous file; empty: by the environment's address and port."""
    shared_gpus: bool = False
    trusted: bool = False
    """Whether the user says that nobody else is on the network between the hosts."""
    forced: bool = False
    """Exchange for real even with nobody else, to measure what that costs."""
    server: int | None = None
    """Which server this process is, if it is one: it carries no worker."""
    meeting: str = ""
    """A folder in which servers say where they listen."""
    key_file: str = ""
    rendezvous: str = ""
    """Where the launcher is asked where servers listen, if not in a folder."""

    @classmethod
    def here(cls, env: Mapping[str, str] = os.environ) -> World:
        try:
            processes = int(env.get("WORLD_SIZE", 1))
            world = cls(
                process=int(env.get("RANK", 0)),
                processes=processes,
                local_process=int(env.get("LOCAL_RANK", 0)),
                workers=int(env.get("WEFT_WORKERS", processes)),
                store=env.get("WEFT_STORE", ""),
                shared_gpus=env.get("WEFT_SHARE_GPUS") == "1",
                trusted=env.get("WEFT_NETWORK") == "trusted"
                or (env.get("LOCAL_WORLD_SIZE") == str(processes) and not env.get("WEFT_RENDEZVOUS")),
                forced=env.get("WEFT_FORCE") == "1",
                server=int(env["WEFT_SERVER"]) if "WEFT_SERVER" in env else None,
                meeting=env.get("WEFT_MEETING", ""),
                key_file=env.get("WEFT_KEY_FILE", ""),
                rendezvous=env.get("WEFT_RENDEZVOUS", ""),
            )
        except ValueError as error:
            raise UserError(f"RANK, WORLD_SIZE or WEFT_WORKERS is not a whole number: {error}") from None
        peer_timeout_s(env)  # refused before anything is started
        if world.server is not None:
            return world
        if world.workers < world.processes:
            raise UserError(f"{world.workers} workers cannot fill {world.processes} processes; use at least one each")
        return world

    def with_servers(self, strategy: Strategy) -> World:
        """Itself, or under a launcher that knows no servers: the last processes are the servers."""
        if self.server is not None or "WEFT_WORKERS" in os.environ or self.processes == 1 or not strategy.has_servers:
            return self
        fits = [n for n in range(1, self.processes) if n + len(strategy.server_hosts(n)) == self.processes]
        if not fits:
            raise UserError(
                f"{self.processes} processes cannot be divided into workers and servers as {strategy.topology} wants "
                "it; start as many as both together"
            )
        workers = fits[0]
        server = self.process - workers if self.process >= workers else None
        return replace(self, workers=workers, processes=workers, server=server)

    @property
    def layout(self) -> Layout:
        return Layout(workers=self.workers, processes=self.processes, process=self.process)

    @property
    def _on_one_machine(self) -> bool:
        """Whether all processes are: then nothing listens where another machine could reach it."""
        return bool(self.store) or _is_here(os.environ.get("MASTER_ADDR", ""))

    @property
    def alone(self) -> bool:
        """Nothing to exchange with anyone."""
        return self.workers == 1 and not self.forced

    def device(self, wanted: str) -> torch.device:
        """The device for `auto`, `cpu` or `cuda`; one GPU per process unless they are shared on purpose."""
        if wanted not in ("auto", "cpu", "cuda"):
            raise UserError(f"--device is '{wanted}', but must be auto, cpu or cuda")
        gpus = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
        if wanted == "cpu" or (wanted == "auto" and not gpus):
            return torch.device("cpu")
        if not gpus:
            raise JobError("--device cuda, but PyTorch sees no GPU; use --device cpu, or see `weft doctor`")
        if self.local_process >= gpus and not self.shared_gpus:
            raise JobError(
                f"{self.local_process + 1} or more workers on a machine with {gpus} GPU{'s' * (gpus > 1)}; use fewer "
                "workers, --device cpu, or --share-gpus (over Gloo, for trying things out)"
            )
        return torch.device("cuda", self.local_process % gpus)

    def connect(self, device: torch.device, timeout_s: float) -> None:
        """Meet the other processes: NCCL between GPUs of their own, Gloo otherwise."""
        if self.processes == 1 and not self.forced:
            return
        backend = "nccl" if device.type == "cuda" and not self.shared_gpus else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self._on_one_machine:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        if self.store:
            method = f"file://{Path(self.store).absolute()}"
            rank, size = self.process, self.processes
        elif "MASTER_ADDR" in os.environ:
            if not self.trusted:
                check_network(os.environ["MASTER_ADDR"])
            method, rank, size = "env://", self.process, self.processes
            name = interface_towards(os.environ["MASTER_ADDR"])
            if name:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        else:
            raise JobError("WORLD_SIZE is set but no rendezvous; start the job with `weft train` or torchrun")
        dist.init_process_group(
            backend, init_method=method, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )

    def mesh(self, timeout_s: float) -> Mesh | None:
        """Connections of our own between processes; None where there is only one."""
        if self.processes == 1:
            return None
        store = dist.distributed_c10d._get_default_store()
        return Mesh(self.process, self.processes, self.address(), store, timeout_s, 0.4 * peer_timeout_s())

    # --- with servers -------------------------------------------------------------------------------------------------

    def encrypts(self, topology: Topology) -> bool:
        """Whether messages to servers on other machines are encrypted: always, but where nobody else is in between."""
        return topology.encrypts or not self.trusted

    def announce(self, server: int, address: tuple[str, int]) -> None:
        """Say where a server listens."""
        text = format_address(address)
        if self.rendezvous:
            with self.at_rendezvous() as rendezvous:
                say_here(rendezvous, server, text, _RENDEZVOUS_S)
            return
        if not self.meeting:
            self._book().set(f"server-{server}", text)
            return
        part = Path(self.meeting) / f"server-{server}.part"
        part.write_text(text)
        part.rename(part.with_suffix(""))

    def find(self, server: int, timeout_s: float) -> tuple[str, int]:
        """A server's address, once it is there."""
        late = PeerLost(f"server {server} did not come up within {timeout_s:g} s; its own message says why")
        if self.rendezvous:
            with self.at_rendezvous() as rendezvous:
                text = ask_where(rendezvous, server, timeout_s)
        elif not self.meeting:
            try:
                text = self._book(timeout_s).get(f"server-{server}").decode()
            except (RuntimeError, ValueError):
                raise late from None
        else:
            file, until = Path(self.meeting) / f"server-{server}", time.monotonic() + timeout_s
            while not file.exists():
                if time.monotonic() > until:
                    raise late
                time.sleep(0.02)
            text = file.read_text()
        return parse_address(text)

    def at_rendezvous(self, retry_s: float = 30.0) -> contextlib.closing[Client]:
        """A link to the launcher's desk."""
        name, key = f"process {self.process} of {socket.gethostname()}", Key.read(Path(self.key_file))
        return contextlib.closing(reach(self.rendezvous, key, name, encrypted=not self.trusted, retry_s=retry_s))

    def _book(self, timeout_s: float = 60.0) -> TCPStore:
        """The launcher's own store, where there is no folder that all see."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))

    def address(self) -> str:
        """Where others reach this process: the address of the interface that the collective library uses too."""
        if self._on_one_machine and not self.rendezvous:
            return "127.0.0.1"
        name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        found = address_of(name) if name else None
        if found is None:
            found = address_towards(parse_address(self.rendezvous)[0] if self.rendezvous else os.environ["MASTER_ADDR"])
        return found or "127.0.0.1"


def check_network(host: str) -> None:
    """Refuse to meet on another host, unless the user has said that the network in between is trusted."""
    if not _is_here(host):
        raise UserError(
            f"gradients would go to {host} and back unencrypted, and the network is not known to be trusted; if nobody "
            "else is on it, say --network trusted, or WEFT_NETWORK=trusted under another launcher"
        )


def _is_here(host: str) -> bool:
    """Whether a name stands for this machine's loopback addresses alone."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)} if host else {host}
    except OSError:
        found = {host}
    return all(address == "::1" or address.startswith("127.") for address in found)


def address_of(interface: str) -> str | None:
    """The IPv4 address of a network interface, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])


def address_towards(host: str) -> str | None:
    """The address from which this machine reaches a host."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """The network interface whose address this machine uses to reach a host; None where that cannot be told."""
    mine = address_towards(host)
    if mine is None:
        return None
    try:
        return next((name for _, name in socket.if_nameindex() if address_of(name) == mine), None)
    except OSError:
        return None
