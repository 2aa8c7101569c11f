"""A server's part of a run: the job's own script builds model and optimizer, and `distribute` serves them.

    run = weft.init()                                      this is a ServerRun, in a process that carries no worker
    model, optimizer = run.distribute(model, optimizer)    never returns: it serves until every worker has left

So a server's optimizer is whatever the job has, with nothing sent but numbers. `Served` is the workers' side of it.
"""

from __future__ import annotations

import logging
import queue
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import LoopError, PeerLost, UserError
from weft.ops import Spec
from weft.runtime.asking import Servers
from weft.runtime.serving import Loss, ParameterServer, hyper, shard_optimizer
from weft.runtime.turns import Turns
from weft.runtime.world import World
from weft.strategy import Strategy
from weft.topology._shards import Range, shards
from weft.transport.messaging import Client, Key

log = logging.getLogger(__name__)

_ELEMENTWISE: set[type[Optimizer]] = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad}
_ELEMENTWISE |= {torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam}
"""Optimizers that treat every value by itself, so that a parameter may be cut."""


def divided(model: nn.Module, optimizer: Optimizer, strategy: Strategy, servers: int) -> list[list[Range]]:
    """Which server keeps what. Parameters stay whole where the optimizer or the compressor looks at all of one."""
    whole = type(optimizer) not in _ELEMENTWISE or not strategy.compression.lossless
    return shards(trained(model), servers, whole=whole)


def trained(model: nn.Module) -> list[Spec]:
    return [Spec(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters() if p.requires_grad]


def refuse(model: nn.Module, world: World) -> None:
    """What servers cannot train yet, or could train wrong."""
    if any(True for _ in model.buffers()):
        raise UserError(
            "the model has buffers (BatchNorm?), which servers do not keep yet; use LayerNorm or GroupNorm, or another "
            "topology, such as direct"
        )
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise UserError("parameter servers train on CPUs so far; use --device cpu, or another topology, such as direct")
    if not world.key_file:
        raise UserError("parameter servers are started by `weft train --strategy ...`; start the job with that")


class ServerRun:
    """What `weft.init()` gives a process that is a server: as much of a run as a script sees before `distribute`."""

    def __init__(self, *, world: World, strategy: Strategy, steps: int | None, seed: int) -> None:
        self.world, self.strategy, self.steps, self.seed = world, strategy.check(), steps, seed
        self.device = torch.device("cpu")
        self.rank, self.step, self.workers, self.is_main = 0, 0, world.workers, False
        self.folder: Path | None = None
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def distribute(self, model: nn.Module, optimizer: Optimizer, *followers: Any, unused: bool = False) -> NoReturn:
        """Serve until every worker has left, and leave."""
        refuse(model, self.world)
        assert self.world.server is not None, "a server's process"
        index, servers = self.world.server, self.strategy.topology.beside(self.workers)
        named = {spec.name: spec for spec in trained(model)}
        flat = {name: p.detach().reshape(-1) for name, p in model.named_parameters()}
        ranges = divided(model, optimizer, self.strategy, servers)[index]
        parts = [nn.Parameter(flat[part.name][part.start : part.stop].clone()) for part in ranges]
        of: dict[Tensor, list[Tensor]] = {}
        for part, own in zip(ranges, parts, strict=True):
            of.setdefault(model.get_parameter(part.name), []).append(own)
        losses: queue.SimpleQueue[Loss] = queue.SimpleQueue()
        server = ParameterServer(
            ("127.0.0.1", 0),
            Key.read(Path(self.world.key_file)),
            synchrony=self.strategy.synchrony,
            compression=self.strategy.compression,
            specs=[part.spec(named[part.name]) for part in ranges],
            parts=parts,
            optimizer=shard_optimizer(optimizer, of),
            workers=self.workers,
            seed=self.seed,
            lost=losses.put,
        )
        _say_where(Path(self.world.meeting) / f"server-{index}", server.address)
        while not server.over.wait(0.1):
            if not losses.empty():
                self._lost(losses.get())
        server.close()
        raise SystemExit(0)

    def _lost(self, loss: Loss) -> None:
        what = f"{loss.name} went away ({loss.reason})"
        if self.strategy.synchrony.everyone:
            raise PeerLost(what)
        log.error("%s; the others go on", what)

    def close(self, *, well: bool = True) -> None:
        """A server leaves nothing behind."""

    def __getattr__(self, name: str) -> Any:
        raise LoopError(f"run.{name} was used before run.distribute(), which servers do not come past; move it below")


class Served:
    """A worker among servers: gradients leave as backward finishes them, and `step` brings the new model."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strategy: Strategy,
        turns: Turns,
        world: World,
        seed: int,
        timeout_s: float,
    ) -> None:
        refuse(model, world)
        self.optimizer, self.turns, self.timeout_s, self.synchrony = optimizer, turns, timeout_s, strategy.synchrony
        servers = strategy.topology.beside(world.workers)
        ranges = divided(model, optimizer, strategy, servers)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names = list(named)
        self.flat = {name: _flat(name, p) for name, p in named.items()}
        key, who = Key.read(Path(world.key_file)), f"worker {turns.rank}"
        most = 4 * max(sum(part.numel for part in each) for each in ranges) * 2 + (1 << 20)
        clients = [
            Client(_where(Path(world.meeting) / f"server-{index}", timeout_s), key, who, most_bytes=most)
            for index in range(servers)
        ]
        specs = {spec.name: spec for spec in trained(model)}
        self.asking = Servers(turns.rank, clients, ranges, specs, strategy.compression, seed)
        self.asking.join(self.flat, timeout_s)
        self.asking.pull(self.flat).wait(timeout_s)
        self.pushed: set[str] = set()
        self.local = False  # gradients from `accumulate` are waiting
        for name, p in named.items():
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._arrived(name, p))

    def _arrived(self, name: str, param: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        if self.turns.accumulating:
            self.turns.accumulated()
            self.local = True
            return
        if name in self.pushed:
            raise LoopError(
                "backward ran twice before step(), and the servers have the first gradient already; put all but the "
                "last backward into `with run.accumulate():`"
            )
        if not self.pushed:
            self.turns.begin_backward()
            if self.local:
                self.turns.accumulated()
            torch.autograd.Variable._execution_engine.queue_callback(self.turns.next)
        if grad.is_sparse or not bool(torch.isfinite(grad).all()):
            what = "sparse" if grad.is_sparse else "not finite"
            raise LoopError(f"the gradient of {name} is {what} at step {self.turns.step + 1}; servers cannot use that")
        self.asking.push({name: grad.reshape(-1).mul_(self.turns.share)}, self.turns.step)
        self.pushed.add(name)
        param.grad = Away.of(grad)

    def step(self) -> None:
        """The servers step; returns when this worker may go on, with the model that it goes on with."""
        missing = next((name for name in self.names if name not in self.pushed), None)
        if missing is not None:
            raise LoopError(f"{missing} had no gradient at step {self.turns.step + 1}, which servers cannot skip yet")
        self.pushed, self.local = set(), False
        numbers = hyper(self.optimizer)
        for group in numbers:
            if isinstance(momentum := group.get("momentum"), float):
                group["momentum"] = self.synchrony.momentum(momentum, self.turns.workers)
        self.asking.commit(self.turns.share, numbers, self.timeout_s)
        self.asking.pull(self.flat).wait(self.timeout_s)

    def close(self) -> None:
        self.asking.leave(self.timeout_s)


class Away(Tensor):
    """A gradient that has gone to the servers: whoever touches it would see this worker's share alone."""

    @staticmethod
    def of(grad: Tensor) -> Tensor:
        away: Tensor = grad.as_subclass(Away)
        return away

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise LoopError(
            "a gradient was touched that has gone to the servers, where it becomes part of the mean; clipping and "
            "scaling between backward() and step() are not built for servers yet"
        )


_HARMLESS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_sparse", "grad_fn", "is_leaf")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride}


def _flat(name: str, param: Tensor) -> Tensor:
    if not param.is_contiguous():
        raise UserError(f"{name} does not lie in one piece of memory; call .contiguous() on it before run.distribute()")
    return param.detach().view(-1)


def _say_where(file: Path, address: tuple[str, int]) -> None:
    part = file.with_suffix(".part")
    part.write_text("{}:{}".format(*address))
    part.rename(file)


def _where(file: Path, timeout_s: float) -> tuple[str, int]:
    """A server's address, once it is there."""
    until = time.monotonic() + timeout_s
    while not file.exists():
        if time.monotonic() > until:
            raise PeerLost(f"{file.name} did not come up within {timeout_s:g} s; its own message says why")
        time.sleep(0.02)
    host, _, port = file.read_text().rpartition(":")
    return host, int(port)
