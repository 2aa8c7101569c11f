"""Parameter servers and their workers as processes, over real links: what they learn, and what they live through."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.compression import Compressor, Context, Piece, State
from weft.errors import PeerLost
from weft.ops import Spec
from weft.runtime.asking import Servers
from weft.runtime.eager import Eager
from weft.runtime.pushing import said
from weft.runtime.server import keep
from weft.runtime.serving import Kept, Loss, ParameterServer, hyper
from weft.runtime.verbs import BEGIN, Verb
from weft.strategy import Strategy
from weft.topology._shards import Bundle, Range, bundles
from weft.transport.mesh import raw
from weft.transport.messaging import Client, Key, Refused
from weft.transport.messaging.frames import Head, Kind

WAIT_S = 30.0
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "weft.runtime.serving", "weft.runtime.asking"])

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
    server = ParameterServer(
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
    tell.send(("seen", server.tally.staleness, server.version, len(server.bundles)))
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
    asking = Servers(rank, clients, divided(model, len(addresses), how), named_specs(model), how.compression)
    flat = {name: p.detach().reshape(-1) for name, p in model.named_parameters()}
    eager = Eager(asking, how.synchrony, flat, (), WAIT_S) if how.synchrony.eager else None
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


# --- servers that send by themselves ---------------------------------------------------------------------------------


class Worker:
    """A worker in this process, whose gradients are all ones."""

    def __init__(self, rank: int, address: tuple[str, int], key: Key, how: Strategy) -> None:
        model = build()
        self.model = {name: p.detach().reshape(-1) for name, p in model.named_parameters()}
        client = Client(address, key, f"worker {rank}", retry_s=WAIT_S)
        self.asking = Servers(rank, [client], divided(model, 1, how), named_specs(model), how.compression)
        self.eager = Eager(self.asking, how.synchrony, self.model, (), WAIT_S)
        if not self.asking.join(WAIT_S)[1]:
            self.asking.start(self.model, {}, (), WAIT_S)
        self.asking.pull(self.model).wait(WAIT_S)
        self.eager.start()

    def push(self) -> None:
        """A step's gradients; returns as they leave."""
        self.eager.begin(())
        step = self.asking.steps
        self.asking.begin(step, 1.0, [{"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}])
        for name, each in self.model.items():
            self.asking.push(name, torch.ones_like(each), step)

    def step(self) -> None:
        self.push()
        self.eager.step()

    def moved(self) -> int:
        """How many updates the model that this worker has is made of."""
        ((by,),) = {tuple((was - now).round().unique().tolist()) for was, now in zip(START, self.values, strict=True)}
        return int(by)

    @property
    def values(self) -> list[Tensor]:
        return list(self.model.values())


@contextmanager
def waiting(act: Callable[[], None]) -> Iterator[None]:
    """What cannot end before, and does after, what is done meanwhile."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    yield
    thread.join(WAIT_S)
    assert not thread.is_alive()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


START = [p.detach().reshape(-1) for p in build().parameters()]


@contextmanager
def one_server(
    how: Strategy, lost: Callable[[Loss], None] = lambda loss: None
) -> Iterator[tuple[ParameterServer, Key]]:
    """For two workers, in this process."""
    key, model = Key.fresh(), build()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    server = ParameterServer(
        ("127.0.0.1", 0),
        key,
        synchrony=how.synchrony,
        compression=how.compression,
        kept=[keep(bundle, model, optimizer) for bundle in divided(model, 1, how)[0]],
        workers=2,
        lost=lost,
    )
    try:
        yield server, key
    finally:
        server.close()


def test_an_eager_worker_goes_on_with_what_it_has_as_long_as_it_may() -> None:
    how = Strategy.parse("essp(slack=3)")
    with one_server(how) as (server, key):
        fast, slow = (Worker(rank, server.address, key, how) for rank in range(2))
        for _ in range(3):
            fast.step()
        assert fast.moved() == 0  # nothing was sent: nobody has finished what the other has not
        with waiting(fast.step):  # four steps ahead
            slow.push()
        assert fast.moved() == 5
        for each in slow.eager._standing:
            each.reply.wait(WAIT_S)  # the five have come here, too, and are not computed with yet
        slow.step()
        for who in (slow, fast):
            who.eager.refresh()
            assert who.moved() == 6
        late = {(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5)}
        assert server.tally.staleness == dict.fromkeys(late, len(server.bundles))
        fast.step()
        fast.eager.refresh()
        assert server.tally.staleness[0, 0] == 2 * len(server.bundles)
        assert server.tally.waits_s[0, 1] > 0
        for each in (fast, slow):
            each.asking.leave(WAIT_S)
        assert server.over.wait(WAIT_S)
        assert not any(bundle.watching for bundle in server.bundles)


def test_what_was_sent_before_a_pull_does_not_undo_it() -> None:
    how = Strategy.parse("essp(slack=3)")
    with one_server(how) as (server, key):
        first, second = (Worker(rank, server.address, key, how) for rank in range(2))
        first.step()
        second.step()
        for each in first.eager._standing:
            each.reply.wait(WAIT_S)
        second.step()
        for who in (second, first):
            who.eager.refresh()
        first.eager.step()
        assert first.moved() == 3
        for who in (first, second):
            who.asking.leave(WAIT_S)


def test_a_worker_that_leaves_lets_those_go_on_who_wait_for_what_is_sent() -> None:
    how = Strategy.parse("essp(slack=0)")
    with one_server(how) as (server, key):
        first, second = (Worker(rank, server.address, key, how) for rank in range(2))
        with waiting(first.step):
            second.asking.leave(WAIT_S)
        assert first.moved() == 1
        first.asking.leave(WAIT_S)


def test_a_worker_that_was_cut_off_is_bound_by_where_it_goes_on() -> None:
    how, lost = Strategy.parse("essp(slack=1)"), threading.Event()
    with one_server(how, lambda loss: lost.set()) as (server, key):
        away, here = (Worker(rank, server.address, key, how) for rank in range(2))
        for each in (here, away):
            each.step()
            each.eager.refresh()
        (client,) = away.asking.clients
        address, link = client.address, client._link
        while not all(0 in bundle.watching and bundle.watching[0].clock == 1 for bundle in server.bundles):
            away.eager.step()  # takes what comes, and asks for what will come after it
        client.address = ("127.0.0.1", 1)
        assert link is not None
        link.stream.sock.shutdown(socket.SHUT_RDWR)
        assert lost.wait(WAIT_S)
        client.address = address
        until(lambda: client._link not in (None, link))
        for _ in range(4):
            here.step()  # nobody waits for who was lost
        here.eager.refresh()
        away.step()  # it is counted from where the other is, and has made one step since
        with waiting(away.step):
            here.step()
        for each in (away, here):
            each.asking.leave(WAIT_S)


def test_an_eager_step_needs_no_word_of_a_server(tmp_path: Path) -> None:
    with cluster(tmp_path, "essp(slack=2)", workers=2, servers=1) as group:
        worker = Worker(0, tuple(group.addresses[0]), Key.read(group.file), group.how)
        process = group.servers[0][0]
        os.kill(process.pid, signal.SIGSTOP)
        worker.step()
        assert worker.moved() == 0
        with waiting(worker.step):  # for the gradients of the step before to arrive
            os.kill(process.pid, signal.SIGCONT)
        assert worker.moved() == 0
        worker.eager.refresh()
        assert worker.moved() == 2
        worker.asking.close()


def test_a_refused_push_is_said_to_who_waits_for_what_is_sent() -> None:
    how = Strategy.parse("essp(slack=0)")
    with one_server(how) as (server, key):
        worker = Worker(0, server.address, key, how)
        worker.asking.ways[-1].about[:8] = (99).to_bytes(8, "big")
        with pytest.raises(Refused, match="version 99, which worker 0 was not given"):
            worker.step()
        worker.asking.close()


# --- strangers and liars --------------------------------------------------------------------------------------------

FRAMES = int(os.environ.get("WEFT_FUZZ_FRAMES", "100000"))


def fingerprint(parts: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(bytes(raw(part.detach())) for part in parts)).hexdigest()


def lonely(key: Key) -> ParameterServer:
    """A server in this process."""
    torch.manual_seed(3)
    parts = [nn.Parameter(torch.randn(100)), nn.Parameter(torch.randn(7))]
    return ParameterServer(
        ("127.0.0.1", 0),
        key,
        synchrony=Strategy.parse("asp").synchrony,
        compression=Strategy.parse("int8").compression,
        kept=[
            Kept([Spec("a", (100,))], parts[:1], torch.optim.SGD(parts[:1], lr=0.1)),
            Kept([Spec("b", (7,))], parts[1:], torch.optim.SGD(parts[1:], lr=0.1)),
        ],
        workers=4,
    )


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


def test_nonsense_with_the_key_is_refused_and_the_server_lives() -> None:
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


def _still_trains(server: ParameterServer, key: Key) -> None:
    bundles = [[(Range("a", 0, 100),), (Range("b", 0, 7),)]]
    specs = {"a": Spec("a", (100,)), "b": Spec("b", (7,))}
    honest = Servers(0, [Client(server.address, key, "honest")], bundles, specs, server.compression)
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
