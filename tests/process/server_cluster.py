"""Parameter servers and workers as processes, below the level of a run."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import PeerLost
from weft.ops import Spec
from weft.runtime.loop.buffers import BufferSlots
from weft.runtime.server.bundle_state import hyper
from weft.runtime.server.client import ServerClient
from weft.runtime.server.prefetch import Prefetcher
from weft.runtime.server.process import keep
from weft.runtime.server.request_loop import Loss
from weft.runtime.server.service import ShardService
from weft.strategy import Strategy
from weft.topology._shards import Bundle, Range, bundles
from weft.transport.messaging import Client, Key

WAIT_S = 30.0
CONTEXT = multiprocessing.get_context("forkserver")


CONTEXT.set_forkserver_preload(["torch", "weft.runtime.server.service", "weft.runtime.server.client"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3)).double()


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(4, 6, generator=rng, dtype=torch.float64)
    return x, x[:, :3].sin()


def specs(model: nn.Module) -> list[Spec]:
    return [Spec(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()]


def named_specs(model: nn.Module) -> dict[str, Spec]:
    return {spec.name: spec for spec in specs(model)}


def divided(model: nn.Module, servers: int, how: Strategy) -> list[list[Bundle]]:
    """Three parameters are cut in two, and the fourth is not: small models are usually not cut at all."""
    whole = not how.compression.raw
    found = []
    for part in [Range(spec.name, 0, spec.numel) for spec in specs(model)]:
        middle = part.stop // 2 if not whole and part.stop > 3 else part.stop
        found += [Range(part.name, 0, middle), Range(part.name, middle, part.stop)][: 2 if middle < part.stop else 1]
    dealt = [found[server::servers] for server in range(servers)]
    return [bundles(each, specs(model), least=200, most=400, alone=whole) for each in dealt]


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def serve(
    tell: Any, file: Path, how: Strategy, kind: str, workers: int, servers: int, index: int, encrypted: bool
) -> None:
    """One server process; told "end" it says what it has seen."""
    torch.set_num_threads(1)
    model = build()
    optimizer = OPTIMIZERS[kind](model.parameters())
    losses: list[Loss] = []
    server = ShardService(
        ("127.0.0.1", 0),
        Key.read(file),
        synchrony=how.synchrony,
        compression=how.compression,
        kept=[keep(bundle, model, optimizer) for bundle in divided(model, servers, how)[index]],
        workers=workers,
        encrypted=encrypted,
        lost=lambda loss: (losses.append(loss), tell.send(("lost", loss.name, time.time())))[0],  # type: ignore[func-returns-value]
    )
    tell.send(server.address)
    tell.recv()
    tell.send(("seen", server.statistics.staleness, server.version, len(server.bundles)))
    server.close()


def work(
    tell: Any,
    file: Path,
    addresses: Sequence[Any],
    how: Strategy,
    kind: str,
    workers: int,
    rank: int,
    steps: int,
    encrypted: bool,
    pace_s: float,
) -> None:
    """One worker process: the model in the end, or what went wrong."""
    torch.set_num_threads(1)
    model = build()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = schedule(optimizer)
    key = Key.read(file)
    clients = [Client(tuple(each), key, f"worker {rank}", encrypted=encrypted) for each in addresses]
    asking = ServerClient(rank, clients, divided(model, len(addresses), how), named_specs(model), how.compression)
    flat = {name: p.detach().reshape(-1) for name, p in model.named_parameters()}
    eager = (
        Prefetcher(asking, how.synchrony, flat, BufferSlots(nn.Module(), 2), WAIT_S) if how.synchrony.eager else None
    )
    try:
        step, started = asking.join(WAIT_S)
        if rank == 0 and not started:
            asking.start(flat, {}, (), WAIT_S)
        asking.pull(flat).wait(WAIT_S)
        if eager:
            eager.start()
        while step < steps:
            tell.send(("start", rank, step, time.time()))
            time.sleep(pace_s)
            x, y = batch(rank, step)
            (nn.functional.mse_loss(model(x), y) / workers).backward()
            if eager:
                eager.begin(())
            asking.begin(step, 1 / workers, hyper(optimizer))
            for name, p in model.named_parameters():
                assert p.grad is not None
                asking.push(name, p.grad.reshape(-1), step)
            optimizer.zero_grad()
            optimizer._opt_called = True  # type: ignore[attr-defined]  # the servers' step was this one
            scheduler.step()
            step += 1
            if eager:
                eager.step()
            else:
                asking.pull(flat).wait(WAIT_S)
        if eager:
            eager.refresh()
        asking.leave(WAIT_S)
        tell.send(("model", rank, {name: p.tolist() for name, p in flat.items()}))
    except PeerLost as error:
        tell.send(("failed", rank, str(error), time.time()))


class Cluster:
    """Servers and workers, each a process, and what they tell."""

    def __init__(self, file: Path, text: str, kind: str, workers: int, servers: int, encrypted: bool) -> None:
        self.how = how = Strategy.parse(text)
        self.file, self.kind, self.workers, self.encrypted = file, kind, workers, encrypted
        self.servers = [
            self._start(serve, file, how, kind, workers, servers, index, encrypted) for index in range(servers)
        ]
        self.addresses = [pipe.recv() for _, pipe in self.servers]
        self.running: dict[int, tuple[Any, Any]] = {}
        self.said: dict[int, list[Any]] = {}

    def _start(self, act: Callable[..., None], *args: Any) -> tuple[Any, Any]:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=act, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def work(self, rank: int, steps: int, pace_s: float = 0.0) -> None:
        self.running[rank] = self._start(
            work, self.file, self.addresses, self.how, self.kind, self.workers, rank, steps, self.encrypted, pace_s
        )

    def until(self, step: int) -> None:
        """Wait until every worker has started a step."""
        for rank, (_, pipe) in self.running.items():
            said = self.said.setdefault(rank, [])
            while not said or said[-1][0] != "start" or said[-1][2] < step:
                assert pipe.poll(WAIT_S), f"worker {rank} says nothing"
                said.append(pipe.recv())

    def told(self, rank: int) -> list[Any]:
        """All that a worker says until it ends."""
        process, pipe = self.running[rank]
        said = self.said.pop(rank, [])
        try:
            while pipe.poll(WAIT_S):
                said.append(pipe.recv())
                if said[-1][0] in ("model", "failed"):
                    break
        except EOFError:
            pass
        process.join(WAIT_S)
        return said

    def seen(self) -> list[Any]:
        found = []
        for _, pipe in self.servers:
            pipe.send("end")
            said = pipe.recv()
            while said[0] != "seen":
                said = pipe.recv()
            found.append(said)
        return found

    def end(self) -> None:
        for process, _ in [*self.servers, *self.running.values()]:
            process.kill()
            process.join()


@contextmanager
def cluster(
    tmp_path: Path, how: str, *, kind: str = "momentum", workers: int = 3, servers: int = 2, encrypted: bool = False
) -> Iterator[Cluster]:
    file = tmp_path / "key"
    Key.make(file)
    group = Cluster(file, how, kind, workers, servers, encrypted)
    try:
        yield group
    finally:
        group.end()


def alone(kind: str, workers: int, steps: int) -> dict[str, list[float]]:
    model = build()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = schedule(optimizer)
    for step in range(steps):
        for rank in range(workers):
            x, y = batch(rank, step)
            (nn.functional.mse_loss(model(x), y) / workers).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: p.reshape(-1).tolist() for name, p in model.named_parameters()}
