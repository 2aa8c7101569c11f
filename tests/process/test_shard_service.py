"""One server: garbage, non-finite gradients and replaced workers change no model."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.process.server_cluster import WAIT_S
from weft.errors import LoopError, PeerLost
from weft.ops import Spec
from weft.runtime.server import request_loop
from weft.runtime.server.bundle_state import BundleState
from weft.runtime.server.client import ServerClient
from weft.runtime.server.protocol import BEGIN, PUSH, Verb
from weft.runtime.server.request_loop import Loss
from weft.runtime.server.service import ShardService
from weft.strategy import Strategy
from weft.topology._shards import Range
from weft.transport.messaging import Client, Key, Refused
from weft.transport.messaging.frames import Head, Kind
from weft.transport.tensor_bytes import raw

# --- strangers and liars --------------------------------------------------------------------------------------------


FRAMES = int(os.environ.get("FUZZ_FRAMES", "100000"))


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


def test_refused_requests_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    key = Key.fresh()
    server = lonely(key)
    liar = Client(server.address, key, "liar")
    for _ in range(50):
        with pytest.raises(Refused, match="cannot be served"):
            liar.ask(Verb.PULL, [memoryview(b"")]).wait(WAIT_S)
    liar.close()
    server.close()
    refused = [each.getMessage() for each in caplog.records if each.name == request_loop.__name__]
    assert len(refused) == 11
    assert all(each.startswith("a request of liar is refused") for each in refused[:10])
    assert refused[10] == "40 more requests were refused"


def test_refusals_are_logged_again_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([*range(12), 60.5, 60.7])
    warnings = request_loop.RefusalWarnings(clock=lambda: next(times))
    for number in range(14):
        warnings.add("liar", f"{number} {'x' * 10**6}")
    warnings.close()
    logged = [each.getMessage() for each in caplog.records]
    assert [each.partition(": ")[2].split(" ")[0] for each in logged[:10]] == [str(number) for number in range(10)]
    assert logged[10] == "2 more requests were refused"
    assert logged[11].startswith("a request of liar is refused: 12 x")
    assert logged[12:] == ["1 more requests were refused"]
    assert max(map(len, logged)) < 1000


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


def test_a_pull_that_times_out_says_how_long_it_has_waited() -> None:
    key = Key.fresh()
    server = lonely(key)
    worker, model = worker_of(server, key), {"a": torch.zeros(100), "b": torch.zeros(7)}
    worker.join(WAIT_S)
    with pytest.raises(PeerLost, match=r"no reply from the server at .* in 0\.25 s"):
        worker.pull(model).wait(0.25)  # nobody has set the model
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
