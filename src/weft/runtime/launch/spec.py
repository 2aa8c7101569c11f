"""The launcher's input: job, workers, processes, servers, nodes, and the seat of each process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from weft.environment import Network
from weft.errors import JobError, UserError
from weft.runtime.launch.gpus import visible_gpus
from weft.runtime.launch.network import check_network
from weft.runtime.launch.strategy_source import COMMAND_LINE
from weft.transport.messaging import Key
from weft.transport.tcp import parse_address

if TYPE_CHECKING:
    from weft.store.checkpoint import Policy
    from weft.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Seat:
    """The place of one process, if not on this machine itself: variables from which its module finds the place."""

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
    network: Network = "untrusted"
    strategy: Strategy | None = None
    strategy_source: str = COMMAND_LINE
    """Where the strategy comes from, for the log."""
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
        if self.device not in ("auto", "cpu", "cuda"):
            raise UserError(f"--device is '{self.device}', but must be auto, cpu or cuda")
        if self.steps is not None and self.steps < 1:
            raise UserError(f"--steps is {self.steps}, but a run takes at least one step")
        if self.grace_s < 0:
            raise UserError(f"--grace is {self.grace_s:g}, but must not be negative; 0 ends a run without saving it")
        if self.nodes < 1 or not 0 <= self.node_rank < self.nodes:
            raise UserError(f"--node-rank is {self.node_rank}, but must lie between 0 and {self.nodes - 1}")
        if self.nodes > 1 and not self.rendezvous:
            raise UserError("--nodes needs --rendezvous HOST:PORT, an address of node 0 that all nodes reach")
        if self.servers and count < self.workers:
            raise UserError("with parameter servers there is a process for each worker; omit --processes")
        self._check_meeting()
        if self.nodes > 1 and self.network != "trusted" and not self.servers:
            check_network(parse_address(self.rendezvous)[0])
        if (count + self.servers) % self.nodes:
            what = f"{count} processes" + f" and {self.servers} servers" * bool(self.servers)
            raise UserError(f"{what} cannot be divided among {self.nodes} nodes; choose a multiple")
        self._check_gpus()
        return self

    def _check_gpus(self) -> None:
        """Check that this machine has a GPU for each process, unless they may share one."""
        if self.device == "cpu":
            return
        gpus = visible_gpus()
        here = -(-self.count // self.nodes)
        if self.device == "cuda" and not gpus:
            raise JobError("--device cuda, but PyTorch sees no GPU; use --device cpu, or see `weft doctor`")
        if gpus and here > gpus and not self.share_gpus:
            raise JobError(
                f"{here} workers, but {gpus} GPU{'s' * (gpus > 1)} here; use -n {gpus}, --device cpu, "
                "or --share-gpus (with Gloo, for experiments)"
            )

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
