"""A server process: the job's own script builds model and optimizer, and `distribute` serves them.

    run = weft.init()                                      in a process without a worker, delegates to a ServerRun
    model, optimizer = run.distribute(model, optimizer)    never returns: it serves until every worker has left

The server's optimizer is thus the job's own, and only numbers are sent. The workers' side is `modes/parameter_server`.
"""

from __future__ import annotations

import itertools
import logging
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.environment import RunOptions
from weft.errors import LoopError, PeerLost, UserError
from weft.ops import Spec
from weft.runtime.launch.malloc import keep_memory
from weft.runtime.launch.process_groups import TERMINATED
from weft.runtime.launch.world import World
from weft.runtime.loop.optimizer_kinds import is_elementwise, is_separable
from weft.runtime.loop.rng import seed_everything
from weft.runtime.record.files import write_json
from weft.runtime.server.aggregator import Aggregator
from weft.runtime.server.bundle_state import BundleState, part_optimizer
from weft.runtime.server.client import ServerClient
from weft.runtime.server.request_loop import Loss
from weft.runtime.server.service import ShardService
from weft.strategy import Strategy
from weft.topology import Topology
from weft.topology._shards import Bundle, bundles, shards
from weft.transport.messaging import Client, Key

log = logging.getLogger(__name__)

_MEET_S = 300.0
_RENDEZVOUS_RETRY_S = 10.0


def divided(model: nn.Module, optimizer: Optimizer, strategy: Strategy, servers: int) -> list[list[Bundle]]:
    """The bundles of each server. Parameters are not cut if the optimizer or the compressor needs whole ones."""
    specs = trained(model)
    alone = not strategy.compression.raw
    least, most = strategy.schedule.key_bytes
    whole = alone or not is_elementwise(optimizer)
    found = shards(specs, servers, whole=whole)
    if not all(found):
        raise UserError(
            f"{servers} servers, but only {sum(map(bool, found))} of them would keep any parameters; use fewer servers"
        )
    return [bundles(each, specs, least=least, most=None if whole else most, alone=alone) for each in found]


def trained(model: nn.Module) -> list[Spec]:
    return [Spec(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters() if p.requires_grad]


def refuse(model: nn.Module, optimizer: Optimizer, world: World) -> None:
    """Raise UserError for a model or optimizer that servers cannot train, or could train wrong."""
    if not is_separable(optimizer):
        raise UserError(
            f"{type(optimizer).__name__} may use several parameters at once, but servers update them one by one; use "
            "another optimizer, or another topology, such as direct"
        )
    if len({p.device for p in model.parameters()}) > 1:
        raise UserError("servers train models on a single device; move the whole model to run.device, or use direct")
    if not world.key_file:
        raise UserError(
            f"{socket.gethostname()} has no key for its messages to servers; start the job with `weft train`, or make "
            "a key with `weft key FILE` and set WEFT_KEY_FILE to it on every machine"
        )


def reach(
    model: nn.Module, optimizer: Optimizer, *, strategy: Strategy, world: World, rank: int, seed: int, timeout_s: float
) -> ServerClient:
    """Connect a worker to its servers: those that keep the model, or the aggregator of its group."""
    topology, bundled = (
        strategy.server_topology,
        divided(model, optimizer, strategy, strategy.server_topology.num_shards(world.workers)),
    )
    servers, place, server_hosts = list(range(len(bundled))), rank, topology.server_hosts(world.workers)
    for number, team in enumerate(topology.worker_groups(world.workers)):
        if rank in team:
            servers, place, bundled = [len(bundled) + number], rank - team.start, [list(itertools.chain(*bundled))]
    return ServerClient(
        place,
        call(servers, f"worker {rank}", model, topology, world, timeout_s),
        bundled,
        {spec.name: spec for spec in trained(model)},
        strategy.compression,
        seed,
        urgent=strategy.schedule.defers,
        near=next((number for number, server in enumerate(servers) if server_hosts[server] == rank), None),
        rank=rank,
    )


def call(
    servers: Iterable[int], who: str, model: nn.Module, topology: Topology, world: World, timeout_s: float
) -> list[Client]:
    """Connect to some servers, as soon as they listen."""
    key, encrypted = Key.read(Path(world.key_file)), world.encrypts(topology)
    most = 16 * max(p.numel() * p.element_size() for p in model.parameters()) + (1 << 26)
    return [
        Client(
            world.find(server, timeout_s), key, who, encrypted=encrypted, encrypt_loopback=False, max_frame_bytes=most
        )
        for server in servers
    ]


class ServerRun:
    """A server process's part in a run: the attributes that a script uses before `distribute`."""

    def __init__(self, *, world: World, strategy: Strategy, steps: int | None, seed: int) -> None:
        self.world, self.strategy, self.steps, self.seed = world, strategy.check(), steps, seed
        self.device = torch.device("cpu")
        self.rank, self.step, self.workers, self.is_main = 0, 0, world.workers, False
        self.folder: Path | None = None
        seed_everything(seed)

    def distribute(
        self, model: nn.Module, optimizer: Optimizer, *followers: Any, unused: bool = False, reduction: str = "mean"
    ) -> NoReturn:
        """Serve until every worker has left, then exit."""
        refuse(model, optimizer, self.world)
        assert self.world.server is not None, "only in a server process"
        keep_memory()
        index = self.world.server
        losses: queue.SimpleQueue[Loss] = queue.SimpleQueue()
        keeps = index < self.strategy.server_topology.num_shards(self.workers)
        server = (self._shard_server if keeps else self._aggregator)(index, model, optimizer, losses.put)
        termination_requested = _termination_requested()
        try:
            with self._announced(index, server) as check_launcher:
                while not server.over.wait(0.1):
                    if not losses.empty():
                        self._lost(losses.get())
                    if termination_requested.is_set() and not server.attended:
                        raise SystemExit(TERMINATED)
                    check_launcher()
            if isinstance(server, Aggregator):
                server.upstream.leave(_MEET_S)
        finally:
            if out := RunOptions.from_env().out:
                write_json(out / f"server-{index}.json", server.statistics.row(index, server.version))
        server.close()
        raise SystemExit(0)

    @contextmanager
    def _announced(self, index: int, server: ShardService | Aggregator) -> Iterator[Callable[[], None]]:
        """Announce this server's address. Yields a check that fails if the launcher ends before all workers joined."""
        self.world.announce(index, server.address)
        if not self.world.rendezvous:
            yield lambda: None
            return
        with self.world.at_rendezvous(_RENDEZVOUS_RETRY_S) as rendezvous:

            def check() -> None:
                try:
                    rendezvous.check()
                except PeerLost as error:
                    if not server.complete:
                        raise PeerLost(f"the run ended before every worker had joined: {error}") from None

            yield check

    def _shard_server(
        self, index: int, model: nn.Module, optimizer: Optimizer, lost: Callable[[Loss], None]
    ) -> ShardService:
        """A server that keeps a shard of the model."""
        topology = self.strategy.server_topology
        mine = divided(model, optimizer, self.strategy, topology.num_shards(self.workers))[index]
        return ShardService(
            (self.world.address(), 0),
            Key.read(Path(self.world.key_file)),
            synchrony=self.strategy.synchrony,
            compression=self.strategy.compression,
            kept=[keep(bundle, model, optimizer) for bundle in mine],
            workers=self.workers,
            worker_groups=topology.worker_groups(self.workers),
            seed=self.seed,
            encrypted=self.world.encrypts(topology),
            encrypt_loopback=False,
            buffers=sum(b.numel() * b.element_size() for b in model.buffers()) if index == 0 else 0,
            lost=lost,
        )

    def _aggregator(
        self, index: int, model: nn.Module, optimizer: Optimizer, lost: Callable[[Loss], None]
    ) -> Aggregator:
        """A server between its group of workers and the shard servers."""
        topology, strategy = self.strategy.server_topology, self.strategy
        num_shards = topology.num_shards(self.workers)
        team = topology.worker_groups(self.workers)[index - num_shards]
        upstream = ServerClient(
            index - num_shards,
            call(range(num_shards), f"the aggregator of worker {team[0]}", model, topology, self.world, _MEET_S),
            divided(model, optimizer, strategy, num_shards),
            {spec.name: spec for spec in trained(model)},
            strategy.compression,
            self.seed,
            urgent=strategy.schedule.defers,
        )
        upstream.join(_MEET_S)
        return Aggregator(
            (self.world.address(), 0),
            Key.read(Path(self.world.key_file)),
            upstream=upstream,
            model={name: p.detach().reshape(-1) for name, p in model.named_parameters() if p.requires_grad},
            buffers=list(model.buffers()),
            workers=len(team),
            encrypted=self.world.encrypts(topology),
            encrypt_loopback=False,
            lost=lost,
        )

    def _lost(self, loss: Loss) -> None:
        what = f"{loss.name} was lost ({loss.reason})"
        if self.strategy.synchrony.lockstep or self.strategy.server_topology.worker_groups(self.workers):
            raise PeerLost(what)
        log.error("%s; the others continue", what)

    def close(self, *, well: bool = True) -> None:
        """Does nothing: a server has nothing to close."""

    def __getattr__(self, name: str) -> Any:
        raise LoopError(f"run.{name} was used before run.distribute(), which never returns on a server; move it below")


def _termination_requested() -> threading.Event:
    """Set by SIGTERM. Workers need servers to save a checkpoint, so servers stay until no worker is left."""
    requested = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: requested.set())
    return requested


def keep(bundle: Bundle, model: nn.Module, optimizer: Optimizer) -> BundleState:
    """A server's copy of a bundle's parts of the model, and an optimizer for them."""
    named = dict(model.named_parameters())
    specs = {spec.name: spec for spec in trained(model)}
    mine = [part.spec(specs[part.name]) for part in bundle]
    parts: list[Tensor] = []
    of: dict[Tensor, list[Tensor]] = {}
    for part, spec in zip(bundle, mine, strict=True):
        values = named[part.name].detach().reshape(-1)[part.start : part.stop]
        parts.append(nn.Parameter(values.clone().view(spec.shape)))
        of.setdefault(named[part.name], []).append(parts[-1])
    stepper, groups = part_optimizer(optimizer, of)
    return BundleState(mine, parts, stepper, groups)
