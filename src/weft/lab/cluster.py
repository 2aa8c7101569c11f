"""An emulated cluster to enter and leave:

    with Cluster(hosts=4, bandwidth="1gbit", links={2: "100mbit"}) as cluster:
        launch(Launch(job="wide", workers=4, seats=cluster.seats(), ...), ...)
        cluster.counters()

It needs no root. Rates are measured before use; nothing survives the process that made it.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from weft.environment import LabOptions, LocalLauncher, ProcessPlace
from weft.errors import JobError, UserError
from weft.lab import control_socket
from weft.lab.probe import PACKET_BYTES
from weft.runtime.launch.spec import Seat
from weft.units import Bandwidth

MOST_HOSTS = 64
_LEAST, _MOST = Bandwidth(10**6), Bandwidth(30 * 10**9)
_TOLERANCE = 0.03
_TRIES = 6
_PROBE_S = 0.4
_RENDEZVOUS_PORT = 29500


class NoLabError(JobError):
    """Network namespaces are not to be had here."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A host's cable: its configured rate, and the rates measured in both directions (None: not measured yet)."""

    host: int
    rate: Bandwidth
    up_bit_s: float | None = None
    down_bit_s: float | None = None
    payload_bytes_s: float | None = None

    def row(self) -> dict[str, Any]:
        rates = {"up_bit_s": self.up_bit_s, "down_bit_s": self.down_bit_s, "payload_bytes_s": self.payload_bytes_s}
        return {"host": self.host, "asked_bit_s": int(self.rate), **rates}


class Cluster:
    """Hosts 0 to n-1, each with a link of its own into one switch."""

    def __init__(
        self,
        hosts: int,
        bandwidth: str = "1gbit",
        links: Mapping[int, str] | None = None,
        *,
        name: str | None = None,
        verify: bool = True,
    ) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise UserError(f"--hosts is {hosts}, but an emulated cluster has 1 to {MOST_HOSTS} hosts")
        rates = {host: Bandwidth.parse(bandwidth) for host in range(hosts)}
        for host, text in (links or {}).items():
            if host not in rates:
                raise UserError(f"--link names host {host}, but hosts are numbered 0 to {hosts - 1}")
            rates[host] = Bandwidth.parse(text)
        for rate in rates.values():
            if not _LEAST <= rate <= _MOST:
                raise UserError(f"a link of {rate} cannot be emulated; choose from {_LEAST} to {_MOST}")
        self.links = [Link(host=host, rate=rate) for host, rate in rates.items()]
        self.name = name or f"{os.getpid()}-{secrets.token_hex(4)}"
        self.verify, self.detached = verify, name is not None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def hosts(self) -> int:
        return len(self.links)

    # --- coming and going -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.up()
        try:
            if self.verify and self.hosts > 1:
                self.check_rates()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Make it. Raises NoLabError where that is not allowed."""
        if sys.platform != "linux":
            raise NoLabError("emulated clusters need Linux; use --links loopback to run without shaped links")
        spec = {"name": self.name, "rates": [int(link.rate) for link in self.links], "detached": self.detached}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weft.lab.cluster_process", json.dumps(spec)],
            stdin=subprocess.DEVNULL if self.detached else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self.detached else None,
            start_new_session=self.detached,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(_path()), "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        word = self._process.stdout.readline()
        said = json.loads(word) if word else {"error": "the emulated cluster ended as it began", "refused": True}
        if "error" in said:
            self.down()
            if said.get("refused"):
                raise NoLabError(f"{said['error']}; use --links loopback to run without shaped links")
            raise JobError(said["error"])

    def down(self) -> None:
        """Take it apart, with whatever still runs on its hosts."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    # --- use --------------------------------------------------------------------------------------------------------

    def seats(self, hosts: Sequence[int] | None = None) -> tuple[Seat, ...]:
        """Where the processes of a run sit: one on each of these hosts, as on machines of their own."""
        chosen = range(self.hosts) if hosts is None else hosts
        if not chosen:
            return ()
        address = self.ask("describe")["addresses"][chosen[0]]
        env = {"MASTER_ADDR": address, "MASTER_PORT": str(_RENDEZVOUS_PORT), "GLOO_SOCKET_IFNAME": "eth0"}
        env |= ProcessPlace(local_rank=0, local_world_size=1, network="trusted").to_env()
        env |= LocalLauncher(pid=0, store="").to_env()  # the launcher is outside of the hosts' process namespace
        env |= {"OMP_NUM_THREADS": str(self.threads)}
        places = (f"{self.name} {host} {self._cpus(host)}" for host in chosen)
        return tuple(Seat(env=env | LabOptions(host=place).to_env()) for place in places)

    def command(self, host: int) -> tuple[str, ...]:
        """What to put before a command so that it runs on a host."""
        return (sys.executable, "-m", "weft.lab.exec_on_host", self.name, str(host), self._cpus(host))

    def _cpus(self, host: int) -> str:
        cores = self.cores(host)
        return ",".join(str(core) for core in cores) if cores else "-"

    def cores(self, host: int) -> list[int] | None:
        """The cores that a host has to itself; None where there are fewer cores than hosts, and all share all."""
        mine = sorted(os.sched_getaffinity(0))
        each = len(mine) // self.hosts
        return mine[host * each : (host + 1) * each] if each else None

    @property
    def threads(self) -> int:
        """Computing threads of a process on a host."""
        return max(1, len(os.sched_getaffinity(0)) // self.hosts)

    def counters(self) -> list[tuple[int, int]] | None:
        """Bytes that each link has carried so far, up and down, with headers."""
        return [(up, down) for up, down in self.ask("counters")["bytes"]]

    def rate(self, host: int, rate: str) -> None:
        self.ask("rate", host=host, bit_s=int(Bandwidth.parse(rate)))

    def cut(self, host: int) -> None:
        """Pull a host's cable: nothing comes through, and nobody is told."""
        self.ask("link", host=host, up=False)

    def mend(self, host: int) -> None:
        self.ask("link", host=host, up=True)

    def ask(self, do: str, **request: Any) -> Any:
        with control_socket.connect(self.name) as end:
            return control_socket.ask(end, do=do, **request)

    # --- rates ------------------------------------------------------------------------------------------------------

    def check_rates(self) -> None:
        """Measure every link both ways, all of them at once; a machine that cannot carry them is refused."""
        best: list[Link] = []
        slowest = min(link.rate for link in self.links)
        packets_s = (
            8 * PACKET_BYTES / (slowest * _TOLERANCE / 3)
        )  # in which a packet more or less is a third of the error
        for attempt in range(_TRIES):
            self.measure(max(_PROBE_S, packets_s) * (1 + attempt))
            self.links = best = [_better(*pair) for pair in zip(best or self.links, self.links, strict=True)]
            wrong = [link for link in self.links if self._fillable(link) and _error(link) > _TOLERANCE]
            if not wrong:
                return
        link = wrong[0]
        assert link.up_bit_s is not None and link.down_bit_s is not None
        raise JobError(
            f"the link of host {link.host} carries {link.up_bit_s / 1e6:.0f} Mbit/s up and "
            f"{link.down_bit_s / 1e6:.0f} down where {link.rate / 1e6:.0f} were configured, with all {self.hosts} "
            "hosts sending; lower --bandwidth or --hosts, or repeat on an idle machine"
        )

    def measure(self, seconds: float = _PROBE_S) -> None:
        """Equal links by sending around a ring, which fills all of them both ways at once; others one by one, against
        all other hosts, since what a fast host sends to a slow one would crowd out the slow one's own traffic."""
        n = self.hosts
        up, down, payload = [0.0] * n, [0.0] * n, [0.0] * n
        if len({link.rate for link in self.links}) == 1:
            ring = [(host, (host + 1) % n) for host in range(n)]
            got = self.ask("measure", senders=ring, seconds=seconds)
            payload = got["payload"]
            up, down = ([rates[way] * 8 for rates in got["links"]] for way in (0, 1))
        else:
            for host in range(n):
                others = [other for other in range(n) if other != host]
                got = self.ask("measure", senders=[(host, other) for other in others], seconds=seconds)
                up[host], payload[host] = got["links"][host][0] * 8, sum(got["payload"])
                got = self.ask("measure", senders=[(other, host) for other in others], seconds=seconds)
                down[host] = got["links"][host][1] * 8
        self.links = [
            Link(host=h, rate=link.rate, up_bit_s=up[h], down_bit_s=down[h], payload_bytes_s=payload[h])
            for h, link in enumerate(self.links)
        ]

    def _fillable(self, link: Link) -> bool:
        """Whether all others together are fast enough to fill a link; one that is not cannot be verified."""
        return link.rate <= sum(other.rate for other in self.links if other.host != link.host)


class Loopback:
    """Hosts that are plain processes, all on this machine's own loopback: nothing is shaped, nothing is counted."""

    def __init__(self, hosts: int) -> None:
        if hosts < 1:
            raise UserError(f"--hosts is {hosts}, but there must be at least one")
        self.hosts = hosts
        self.links: list[Link] = []

    @property
    def threads(self) -> int:
        return max(1, len(os.sched_getaffinity(0)) // self.hosts)

    def seats(self, hosts: Sequence[int] | None = None) -> tuple[Seat, ...]:
        chosen = range(self.hosts) if hosts is None else hosts
        return tuple(Seat(env={"OMP_NUM_THREADS": str(self.threads)}) for _ in chosen)

    def counters(self) -> list[tuple[int, int]] | None:
        return None


def _better(one: Link, other: Link) -> Link:
    """Each way's higher rate: a shaper lets nothing through beyond its own, but TCP and a busy machine fall short."""
    return replace(
        one,
        up_bit_s=max(one.up_bit_s or 0.0, other.up_bit_s or 0.0),
        down_bit_s=max(one.down_bit_s or 0.0, other.down_bit_s or 0.0),
        payload_bytes_s=max(one.payload_bytes_s or 0.0, other.payload_bytes_s or 0.0),
    )


def _error(link: Link) -> float:
    return max(abs((rate or 0.0) / link.rate - 1) for rate in (link.up_bit_s, link.down_bit_s))


def _path() -> list[str]:
    """The cluster's process imports this very package: the folder that holds it comes first."""
    return [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
