"""Servers that send by themselves: who goes on with what, who waits for whom, and how late gradients are said to be."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.process.server_cluster import OPTIMIZERS, WAIT_S, build, cluster, divided, named_specs
from weft.runtime.loop.buffers import BufferSlots
from weft.runtime.server.client import ServerClient
from weft.runtime.server.prefetch import Prefetcher
from weft.runtime.server.process import keep
from weft.runtime.server.request_loop import Loss
from weft.runtime.server.service import ShardService
from weft.strategy import Strategy
from weft.transport.messaging import Client, Key, Refused


class Worker:
    """A worker in this process, whose gradients are all ones."""

    def __init__(self, rank: int, address: tuple[str, int], key: Key, how: Strategy) -> None:
        model = build()
        self.model = {name: p.detach().reshape(-1) for name, p in model.named_parameters()}
        client = Client(address, key, f"worker {rank}", retry_s=WAIT_S)
        self.asking = ServerClient(rank, [client], divided(model, 1, how), named_specs(model), how.compression)
        self.eager = Prefetcher(self.asking, how.synchrony, self.model, BufferSlots(nn.Module(), 2), WAIT_S)
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
def one_server(how: Strategy, lost: Callable[[Loss], None] = lambda loss: None) -> Iterator[tuple[ShardService, Key]]:
    """For two workers, in this process."""
    key, model = Key.fresh(), build()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    server = ShardService(
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
        assert server.statistics.staleness == dict.fromkeys(late, len(server.bundles))
        fast.step()
        fast.eager.refresh()
        assert server.statistics.staleness[0, 0] == 2 * len(server.bundles)
        assert server.statistics.waits_s[0, 1] > 0
        for each in (fast, slow):
            each.asking.leave(WAIT_S)
        assert server.over.wait(WAIT_S)
        assert not any(bundle.subscriptions for bundle in server.bundles)


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
        while not all(0 in bundle.subscriptions and bundle.subscriptions[0].clock == 1 for bundle in server.bundles):
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
        worker.asking.routes[-1].about[:8] = (99).to_bytes(8, "big")
        with pytest.raises(Refused, match="version 99, which worker 0 has not read"):
            worker.step()
        worker.asking.close()
