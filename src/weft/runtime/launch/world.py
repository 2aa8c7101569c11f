"""The place of this process in the run, as a launcher (weft, torchrun, Slurm through either) sets it by environment."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from weft.environment import LocalLauncher, ProcessPlace, UserSettings
from weft.errors import JobError, PeerLost, UserError
from weft.runtime.launch.network import address_of, address_towards, check_network, interface_towards, is_loopback
from weft.runtime.launch.rendezvous import ask_where, reach, say_here
from weft.transport.heartbeat import peer_timeout_s
from weft.transport.layout import Layout
from weft.transport.mesh import Mesh
from weft.transport.messaging import Client, Key
from weft.transport.tcp import format_address, parse_address

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from weft.strategy import Strategy
    from weft.topology import Topology

_RENDEZVOUS_S = 60.0


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all processes, and the logical workers that they carry."""

    process: int = 0
    processes: int = 1
    local_process: int = 0
    workers: int = 1
    store: str = ""
    """A rendezvous file; empty: the address and port in the environment."""
    shared_gpus: bool = False
    trusted: bool = False
    """Whether the user trusts the network between the hosts."""
    forced: bool = False
    """Perform exchanges even with a single worker, to measure their cost."""
    server: int | None = None
    """The number of this server, if the process is one; it carries no worker."""
    meeting: str = ""
    """A folder in which servers announce their addresses."""
    key_file: str = ""
    rendezvous: str = ""
    """The address of the launcher's rendezvous, if there is no such folder."""

    @classmethod
    def here(cls, env: Mapping[str, str] = os.environ) -> World:
        place, launcher = ProcessPlace.from_env(env), LocalLauncher.from_env(env)
        processes = 1 if place.world_size is None else place.world_size
        here = place.local_world_size == processes and not place.rendezvous
        world = cls(
            process=place.rank or 0,
            processes=processes,
            local_process=place.local_rank or 0,
            workers=processes if place.workers is None else place.workers,
            store=launcher.store or "",
            shared_gpus=place.share_gpus,
            trusted=place.network == "trusted" or here,
            forced=UserSettings.from_env(env).force,
            server=place.server,
            meeting=str(launcher.server_addresses or ""),
            key_file=str(launcher.key_file or ""),
            rendezvous=place.rendezvous or "",
        )
        peer_timeout_s(env)  # checked before anything is started
        if world.server is not None:
            return world
        if world.workers < world.processes:
            raise UserError(f"{world.workers} workers cannot fill {world.processes} processes; use at least one each")
        return world

    def with_servers(self, strategy: Strategy) -> World:
        """Self, or, under a launcher that does not know servers, with the last processes as servers."""
        weft_launched = ProcessPlace.from_env().workers is not None
        if self.server is not None or weft_launched or self.processes == 1 or not strategy.has_servers:
            return self
        fits = [n for n in range(1, self.processes) if n + len(strategy.server_hosts(n)) == self.processes]
        if not fits:
            raise UserError(
                f"{self.processes} processes cannot be divided into the workers and servers of {strategy.topology}; "
                "start as many as both together"
            )
        workers = fits[0]
        server = self.process - workers if self.process >= workers else None
        return replace(self, workers=workers, processes=workers, server=server)

    @property
    def layout(self) -> Layout:
        return Layout(workers=self.workers, processes=self.processes, process=self.process)

    @property
    def _on_one_machine(self) -> bool:
        """Whether all processes are on one machine; then nothing listens where another machine can connect."""
        return bool(self.store) or is_loopback(os.environ.get("MASTER_ADDR", ""))

    @property
    def alone(self) -> bool:
        """Whether there is nothing to exchange."""
        return self.workers == 1 and not self.forced

    def device(self, wanted: str) -> torch.device:
        """The device for `auto`, `cpu` or `cuda`; one GPU per process unless sharing is enabled."""
        if wanted not in ("auto", "cpu", "cuda"):
            raise UserError(f"--device is '{wanted}', but must be auto, cpu or cuda")
        import torch

        gpus = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
        if wanted == "cpu" or (wanted == "auto" and not gpus):
            return torch.device("cpu")
        if not gpus:
            raise JobError("--device cuda, but PyTorch sees no GPU; use --device cpu, or see `weft doctor`")
        if self.local_process >= gpus and not self.shared_gpus:
            raise JobError(
                f"{self.local_process + 1} or more workers on a machine with {gpus} GPU{'s' * (gpus > 1)}; use fewer "
                "workers, --device cpu, or --share-gpus (with Gloo, for experiments)"
            )
        return torch.device("cuda", self.local_process % gpus)

    def connect(self, device: torch.device, timeout_s: float) -> None:
        """Join the process group: NCCL if each process has its own GPU, else Gloo."""
        if self.processes == 1 and not self.forced:
            return
        import torch
        import torch.distributed as dist

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
        """Weft's own connections between processes; None for a single process."""
        if self.processes == 1:
            return None
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        return Mesh(self.process, self.processes, self.address(), store, timeout_s, 0.4 * peer_timeout_s())

    # --- with servers -------------------------------------------------------------------------------------------------

    def encrypts(self, topology: Topology) -> bool:
        """Whether messages to servers on other machines are encrypted: always, except on a trusted network."""
        return topology.encrypts or not self.trusted

    def announce(self, server: int, address: tuple[str, int]) -> None:
        """Announce the address of a server."""
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
        """The address of a server, once it is announced."""
        late = PeerLost(f"server {server} did not start within {timeout_s:g} s; its own message gives the reason")
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
        """A connection to the launcher's rendezvous."""
        name, key = f"process {self.process} of {socket.gethostname()}", Key.read(Path(self.key_file))
        return contextlib.closing(reach(self.rendezvous, key, name, encrypted=not self.trusted, retry_s=retry_s))

    def _book(self, timeout_s: float = 60.0) -> TCPStore:
        """The launcher's store, used if there is no shared folder."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))

    def address(self) -> str:
        """The address of this process for others: that of the interface that the collective library uses too."""
        if self._on_one_machine and not self.rendezvous:
            return "127.0.0.1"
        name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        found = address_of(name) if name else None
        if found is None:
            found = address_towards(parse_address(self.rendezvous)[0] if self.rendezvous else os.environ["MASTER_ADDR"])
        return found or "127.0.0.1"
