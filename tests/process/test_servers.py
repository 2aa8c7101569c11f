"""Parameter servers and their workers as processes, over real links: what they learn, and what they live through."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.compression import Compressor, Context, Piece, State
from weft.errors import LoopError, PeerLost
from weft.ops import Spec
from weft.runtime.loop.logical_workers import BufferSlots
from weft.runtime.server.bundle_state import BundleState, hyper
from weft.runtime.server.client import ServerClient
from weft.runtime.server.compressed_push import said
from weft.runtime.server.prefetch import Prefetcher
from weft.runtime.server.process import keep
from weft.runtime.server.protocol import BEGIN, PUSH, Verb
from weft.runtime.server.service import Loss, ShardService
from weft.strategy import Strategy
from weft.topology._shards import Bundle, Range, bundles
from weft.transport.mesh import raw
from weft.transport.messaging import Client, Key, Refused
from weft.transport.messaging.frames import Head, Kind

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
    whole = not how.compression.lossless
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


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("how", "servers", "encrypted"),
    [("bsp", 1, False), ("bsp", 3, True), ("ssp(slack=0)", 2, False), ("essp(slack=0)", 2, False)],
)
def test_synchronous_servers_learn_what_one_process_learns(
    tmp_path: Path, kind: str, how: str, servers: int, encrypted: bool
) -> None:
    with cluster(tmp_path, how, kind=kind, servers=servers, encrypted=encrypted) as group:
        for rank in range(3):
            group.work(rank, 10)
        models = [group.told(rank)[-1] for rank in range(3)]
        expected = alone(kind, 3, 10)
        for word, _, model in models:
            assert word == "model"
            for name, values in expected.items():
                assert model[name] == pytest.approx(values, rel=0, abs=1e-10)
        assert models[0][2] == models[1][2] == models[2][2]
        assert all(version == 10 and {late for _, late in stale} == {0} for _, stale, version, _ in group.seen())


@pytest.mark.parametrize(
    "compression", ["int8", "qsgd(levels=4, bucket=8)", "error_feedback(onebit)", "error_feedback(topk(ratio=0.2))"]
)
def test_compressed_pushes_are_what_their_compressor_says(tmp_path: Path, compression: str) -> None:
    with cluster(tmp_path, f"bsp / {compression}", kind="adam") as group:
        for rank in range(3):
            group.work(rank, 10)
        models = [group.told(rank)[-1] for rank in range(3)]
    expected = alone_compressed(group.how.compression, "adam", 3, 10, servers=2)
    for word, _, model in models:
        assert word == "model"
        for name, values in expected.items():
            assert model[name] == pytest.approx(values, rel=0, abs=1e-10)


def alone_compressed(
    compression: Compressor, kind: str, workers: int, steps: int, servers: int
) -> dict[str, list[float]]:
    """Every worker's words, range by range, heard and added up in one process."""
    model = build()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = schedule(optimizer)
    how = Strategy.of(compression)
    ranges = [part for each in divided(model, servers, how) for bundle in each for part in bundle]
    states: list[State] = [{} for _ in range(workers)]
    for step in range(steps):
        total = {name: torch.zeros_like(p).reshape(-1) for name, p in model.named_parameters()}
        for rank in range(workers):
            optimizer.zero_grad()
            x, y = batch(rank, step)
            (nn.functional.mse_loss(model(x), y) / workers).backward()
            for part in ranges:
                grad = dict(model.named_parameters())[part.name].grad
                assert grad is not None
                mine, spec = grad.reshape(-1)[part.start : part.stop], part.spec(named_specs(model)[part.name])
                ctx, mean = Context(step=step, rank=rank, workers=1), torch.empty_like(mine)
                said(compression, Piece(spec, mine.clone(), mean), states[rank], ctx)
                total[part.name][part.start : part.stop] += mean
        for name, p in model.named_parameters():
            p.grad = total[name].view(p.shape)
        optimizer.step()
        scheduler.step()
    return {name: p.reshape(-1).tolist() for name, p in model.named_parameters()}


@pytest.mark.parametrize("how", ["ssp(slack=2)", "essp(slack=2)"])
def test_the_slack_holds_though_a_worker_is_stopped(tmp_path: Path, how: str) -> None:
    with cluster(tmp_path, how) as group:
        for rank in range(3):
            group.work(rank, 30, pace_s=0.02)
        group.until(5)
        os.kill(group.running[2][0].pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(group.running[2][0].pid, signal.SIGCONT)
        said = [each for rank in range(3) for each in group.told(rank)]
        starts = sorted((when, rank, step) for what, rank, step, when in (s for s in said if s[0] == "start"))
        assert sum(what[0] == "model" for what in said) == 3
        begun, furthest = [0, 0, 0], 0
        for _, rank, step in starts:
            begun[rank] = step
            furthest = max(furthest, step - min(begun))
        assert furthest <= 2 + 1  # a start is told before it is seen here; finished steps are what the bound is about
        assert furthest >= 2


@pytest.mark.parametrize("how", ["asp", "essp(slack=2)"])
def test_a_killed_worker_is_named_and_the_others_go_on_and_it_may_come_back(tmp_path: Path, how: str) -> None:
    with cluster(tmp_path, how, servers=1) as group:
        for rank in range(3):
            group.work(rank, 60, pace_s=0.05)
        group.until(5)
        killed = time.time()
        group.running[2][0].kill()
        pipe = group.servers[0][1]
        assert pipe.poll(WAIT_S)
        what, name, when = pipe.recv()
        assert (what, name) == ("lost", "worker 2")
        assert when - killed < 5
        group.running[2][0].join()
        group.said.pop(2)
        group.work(2, 20, pace_s=0.05)
        assert [group.told(rank)[-1][0] for rank in range(3)] == ["model"] * 3
        ((_, stale, version, bundles),) = group.seen()
        assert stale.total() >= 120 * bundles and version >= 120
        assert max(late for _, late in stale) > 0


@pytest.mark.parametrize("how", ["bsp", "essp(slack=2)"])
def test_a_killed_server_stops_every_worker_with_its_name(tmp_path: Path, how: str) -> None:
    with cluster(tmp_path, how) as group:
        for rank in range(3):
            group.work(rank, 1000, pace_s=0.02)
        group.until(5)
        killed = time.time()
        group.servers[1][0].kill()
        for rank in range(3):
            what, _, message, when = group.told(rank)[-1]
            assert what == "failed" and f"127.0.0.1:{group.addresses[1][1]}" in message
            assert when - killed < 5


def test_a_worker_killed_under_bsp_is_named_and_nobody_goes_on_without_it(tmp_path: Path) -> None:
    with cluster(tmp_path, "bsp", servers=1) as group:
        for rank in range(3):
            group.work(rank, 1000, pace_s=0.02)
        group.until(5)
        group.running[1][0].kill()
        pipe = group.servers[0][1]
        assert pipe.poll(WAIT_S)
        assert pipe.recv()[1] == "worker 1"
        version = group.seen()[0][2]
        assert version < 1000


# --- strangers and liars --------------------------------------------------------------------------------------------

FRAMES = int(os.environ.get("WEFT_FUZZ_FRAMES", "100000"))


def fingerprint(parts: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(bytes(raw(part.detach())) for part in parts)).hexdigest()


BUNDLES = [[(Range("a", 0, 100),), (Range("b", 0, 7),)]]
SPECS = {"a": Spec("a", (100,)), "b": Spec("b", (7,))}


def lonely(key: Key, how: str = "asp / parameter_server / int8", workers: int = 4, **options: Any) -> ShardService:
    """A server in this process."""
    torch.manual_seed(3)
    parts = [nn.Parameter(torch.randn(100)), nn.Parameter(torch.randn(7))]
    strategy = Strategy.parse(how)
    return ShardService(
        ("127.0.0.1", 0),
        key,
        synchrony=strategy.synchrony,
        compression=strategy.compression,
        kept=[
            BundleState([Spec("a", (100,))], parts[:1], torch.optim.SGD(parts[:1], lr=0.1)),
            BundleState([Spec("b", (7,))], parts[1:], torch.optim.SGD(parts[1:], lr=0.1)),
        ],
        workers=workers,
        **options,
    )


def worker_of(server: ShardService, key: Key, rank: int = 0) -> ServerClient:
    """A worker of a `lonely` server."""
    return ServerClient(rank, [Client(server.address, key, f"worker {rank}")], BUNDLES, SPECS, server.compression)


def test_garbage_without_the_key_changes_no_model() -> None:
    rng, key = random.Random(5), Key.fresh()
    server = lonely(key)
    before, memory = fingerprint([part for each in server.bundles for part in each.kept.parts]), peak_bytes()
    for _ in range(FRAMES // 500):
        frames = []
        for _ in range(500):
            head = Head(Kind.ONCE, rng.randrange(7), rng.randrange(1, 999), 0)
            body = rng.randbytes(rng.randrange(40))
            frames.append(head.pack([len(body)]) + body[: rng.randrange(1, 41)])
        with suppress(OSError), socket.create_connection(server.address, timeout=WAIT_S) as sock:
            sock.sendall(b"".join(frames))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    assert fingerprint([part for each in server.bundles for part in each.kept.parts]) == before
    assert peak_bytes() - memory < 64 << 20
    _still_trains(server, key)
    server.close()


def test_nonsense_with_the_key_is_refused_and_the_server_lives(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "weft.runtime.server.service")  # or a warning for each would be kept here
    rng, key = random.Random(6), Key.fresh()
    server = lonely(key)
    liar = Client(server.address, key, "liar")
    memory, open_ = peak_bytes(), []
    for _ in range(FRAMES // 5):
        verb = rng.choice([*range(8), Verb.WATCH])
        sizes = [rng.choice([0, 1, 4, 8, 12, 16, 20, 24, 40]) for _ in range(rng.randrange(4))]
        parts = [
            memoryview(bytes(3) + bytes([rng.randrange(6)]) + rng.randbytes(size))[: max(size, 4)] for size in sizes
        ]
        if verb == Verb.BEGIN and rng.random() < 0.5:
            parts = [
                memoryview(BEGIN.pack(1, 0, 0.5, False)),
                memoryview(rng.choice([b"5", b"[5]", b"{}", b"null", b'[{"lr": "x"}]'])),
            ]
        open_.append(liar.ask(verb, parts, once=rng.random() < 0.5))
        if len(open_) > 50:
            with suppress(Refused, PeerLost):
                open_.pop(0).wait(0.0 if verb in (Verb.PULL, Verb.WATCH) else 0.05)
    assert peak_bytes() - memory < 64 << 20
    liar.close()
    _still_trains(server, key)
    server.close()


def alone_with(server: ShardService, key: Key) -> tuple[ServerClient, dict[str, Tensor]]:
    """Worker 0, which has joined and read the model, of zeros."""
    worker, model = worker_of(server, key), {"a": torch.zeros(100), "b": torch.zeros(7)}
    if not worker.join(WAIT_S)[1]:
        worker.start(model, {}, (), WAIT_S)
    worker.pull(model).wait(WAIT_S)
    return worker, model


def take_step(worker: ServerClient, model: dict[str, Tensor], step: int, size: float) -> None:
    worker.begin(step, 1.0, [{"lr": 1.0}])
    for name, values in model.items():
        worker.push(name, torch.full_like(values, size), step)
    worker.pushed(WAIT_S)
    worker.pull(model).wait(WAIT_S)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("compression", ["dense", "cast(dtype=bf16)"])
def test_a_gradient_that_is_not_finite_changes_no_model(compression: str, bad: float) -> None:
    key = Key.fresh()
    server = lonely(key, f"asp / parameter_server / {compression}")
    worker, model = alone_with(server, key)
    words = torch.full((7,), bad, dtype=torch.bfloat16 if "cast" in compression else torch.float32)
    worker.begin(0, 1.0, [{"lr": 1.0}])
    head = memoryview(PUSH.pack(0, 1, 0, 0))
    with pytest.raises(Refused, match="the gradient of b from worker 0 is NaN or infinite at step 1"):
        worker.clients[0].ask(Verb.PUSH, [head, raw(words)], once=True).wait(WAIT_S)
    with pytest.raises(Refused, match="the gradient of b from worker 0 is NaN or infinite at step 1"):
        worker.pull(model).wait(WAIT_S)
    assert not any(part.any() for each in server.bundles for part in each.kept.parts)
    worker.close()
    server.close()


def test_a_compressor_that_overflows_is_named_before_anything_is_sent() -> None:
    key = Key.fresh()
    server = lonely(key, "asp / parameter_server / error_feedback(cast(dtype=fp16))")
    worker, model = alone_with(server, key)
    with pytest.raises(LoopError, match=r"fp16\)\) makes NaN or infinite values of the gradient of a"):
        take_step(worker, model, 0, 1e5)
    assert all(torch.isfinite(kept).all() for memory in worker.state.values() for kept in memory.values())
    assert not any(part.any() for each in server.bundles for part in each.kept.parts)
    worker.close()
    server.close()


def test_a_worker_that_was_replaced_changes_nothing_any_more() -> None:
    losses: list[Loss] = []
    key = Key.fresh()
    server = lonely(key, "asp / parameter_server", lost=losses.append)
    old, model = alone_with(server, key)
    take_step(old, model, 0, 1.0)
    new, model = alone_with(server, key)
    take_step(new, model, 1, 1.0)
    with pytest.raises(Refused, match="worker 0 has not joined, or was replaced"):
        take_step(old, {name: each.clone() for name, each in model.items()}, 1, 100.0)
    for ask in (lambda: old.fetch(WAIT_S), lambda: old.tell([1], WAIT_S), lambda: old.leave(WAIT_S)):
        with pytest.raises(Refused, match="was replaced"):
            ask()
    old.close()
    take_step(new, model, 2, 1.0)
    assert all((values == -3.0).all() for values in model.values())
    assert not losses
    new.close()
    until = time.monotonic() + WAIT_S
    while not losses and time.monotonic() < until:
        time.sleep(0.01)
    assert [loss.name for loss in losses] == ["worker 0"]
    server.close()


def test_a_worker_that_comes_back_takes_part_in_the_next_telling() -> None:
    key = Key.fresh()
    server = lonely(key, workers=2)
    workers = [worker_of(server, key, rank) for rank in (0, 1)]
    with ThreadPoolExecutor() as pool:
        for again in range(3):
            if again:
                workers[1].close()
                workers[1] = worker_of(server, key, 1)
            for worker in workers if not again else workers[1:]:
                worker.join(WAIT_S)
            told = [pool.submit(worker.tell, [worker.rank, again], WAIT_S) for worker in workers]
            assert [each.result() for each in told] == [[[0, again], [1, again]]] * 2
    for worker in workers:
        worker.close()
    server.close()


def test_buffers_come_with_the_model_where_a_round_is_waited_for() -> None:
    key = Key.fresh()
    server = lonely(key, "backup(spares=0) / parameter_server", workers=1, buffers=8)
    worker = worker_of(server, key)
    model, buffer = {"a": torch.zeros(100), "b": torch.zeros(7)}, torch.ones(2)
    worker.join(WAIT_S)
    worker.start(model, {}, [buffer], WAIT_S)
    worker.pull(model, [buffer.zero_()]).wait(WAIT_S)
    assert buffer.tolist() == [1.0, 1.0]
    worker.close()
    server.close()


def _still_trains(server: ShardService, key: Key) -> None:
    honest = worker_of(server, key)
    model = {"a": torch.randn(100), "b": torch.randn(7)}
    if not honest.join(WAIT_S)[1]:
        honest.start(model, {}, (), WAIT_S)
    honest.pull(model).wait(WAIT_S)
    before = {name: each.clone() for name, each in model.items()}
    honest.begin(0, 1.0, [{"lr": 0.1}])
    honest.push("a", torch.ones(100), 0)
    honest.push("b", torch.ones(7), 0)
    honest.pull(model).wait(WAIT_S)
    assert all((before[name] - model[name]).min() > 0.05 for name in model)
    honest.leave(WAIT_S)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
