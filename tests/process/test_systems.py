"""Every system that is said to run does what its row says: its mechanism is observed in a real run, row by row.

Bytes are the kernel's own, of each connection; requests to servers are those that left; staleness is what servers
counted. Rows of one strategy share a run, and have a check each.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import statistics
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.process.harness import spawn
from weft import systems
from weft.runtime.server.protocol import PULL, Verb
from weft.transport.messaging import Client

STEPS = 6
PAUSE_S = 0.05
RATE = 0.125


# --- jobs -------------------------------------------------------------------------------------------------------------


class Pause(torch.autograd.Function):
    """Backward stops here for a while: what is behind has its gradients, what is before has none yet."""

    seen: ClassVar[list[tuple[float, float]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        began = time.perf_counter()
        time.sleep(PAUSE_S)
        Pause.seen.append((began, time.perf_counter()))
        return grad


class Layers(nn.Module):
    """Six layers of 257 KiB; backward pauses before the first one's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.rest = nn.Sequential(*[nn.Linear(256, 256) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(Pause.apply(self.first(x)))


class Wide(nn.Module):
    """A small layer before one of 32 MiB, whose gradient is there first and takes long to send."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 2048)
        self.rest = nn.Linear(2048, 4096)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x[:, :64]))


class Constant(nn.Module):
    """Two parameters, whose gradients are 1 whatever their values are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        forwards.append(time.perf_counter())
        return (self.a + self.b) * x.mean()


class Fading(Constant):
    """Gradients of 2 in the first half of the run, and of 0 in the second."""


forwards: list[float] = []
asked: list[tuple[float, Verb, int, int]] = []


def train(folder: str, kind: type[nn.Module], steps: int, slow_s: float, momentum: float) -> dict[str, Any]:
    """Train, and tell what was seen; with `slow_s` the last worker takes so much longer for a step."""
    listen()
    run = weft.init(steps=steps)
    torch.manual_seed(1)
    optimizer: Any
    model: Any = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    model, optimizer = run.distribute(model, optimizer)
    meet(folder, "began", run.rank, run.workers)
    before = received()
    grads: dict[str, Tensor] = {}
    computed, path = [], []
    for x in run.shard(batches(kind, steps, run.workers)):
        loss = model(x) if issubclass(kind, Constant) else model(x).square().mean()
        time.sleep(slow_s if run.rank == run.workers - 1 else 0)
        computed.append(time.perf_counter())
        loss.backward()
        optimizer.step()
        if kind is Layers and not grads:
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if type(p.grad) is Tensor}
        optimizer.zero_grad()
        if issubclass(kind, Constant):
            path.append([-p.item() / RATE for p in model.parameters()])
    got = {ends: count - before.get(ends, 0) for ends, count in received().items()}
    shared = all(p.is_shared() for p in model.parameters())
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    meet(folder, "ended", run.rank, run.workers)
    run.close()
    return {"received": got, "grads": grads, "asked": asked, "pauses": Pause.seen, "forwards": forwards} | {
        "computed": computed,
        "path": path,
        "shared": shared,
        "bytes": nbytes,
    }


def batches(kind: type[nn.Module], steps: int, workers: int) -> list[Tensor]:
    if issubclass(kind, Constant):
        half = steps * workers // 2
        first, second = (2.0, 0.0) if kind is Fading else (1.0, 1.0)
        return [torch.full((8,), first)] * half + [torch.full((8,), second)] * half
    rng = torch.Generator().manual_seed(2)
    return [torch.randn(8, 256, generator=rng) for _ in range(steps * workers)]


def listen() -> None:
    """Note every request to a server as it leaves: when, what, how large, how urgent."""
    ask = Client.ask

    def noted(self: Client, verb: int, parts: Any = (), **how: Any) -> Any:
        urgency = PULL.unpack(parts[0])[3] if verb == Verb.PULL else how.get("priority", 0)
        asked.append((time.perf_counter(), Verb(verb), sum(map(len, parts[1:])), urgency))
        return ask(self, verb, parts, **how)

    Client.ask = noted  # type: ignore[method-assign]


def meet(folder: str, where: str, rank: int, workers: int) -> None:
    (Path(folder) / f"{where}-{rank}").touch()
    while len(list(Path(folder).glob(f"{where}-*"))) < workers:
        time.sleep(0.01)


def received() -> dict[tuple[int, int], int]:
    """Bytes that have come over each TCP connection of this process, by its two ports, as the kernel counts them."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as end:
                here, there = end.getsockname()[1], end.getpeername()[1]
                info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                found[here, there] = struct.unpack_from("Q", info, 128)[0]  # tcpi_bytes_received
        except (OSError, IndexError, TypeError):
            continue  # not TCP, or not connected
    return found


# --- what a run shows -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """One run."""

    workers: list[dict[str, Any]]
    servers: list[dict[str, Any]]
    traces: list[list[dict[str, Any]]]
    steps: int

    @property
    def bytes(self) -> int:
        """All gradients of a step."""
        return int(self.workers[0]["bytes"])

    def traffic(self) -> dict[tuple[int, int], float]:
        """From worker to worker: bytes of a step, as a share of all its gradients; nothing below 3 percent."""
        home = {ends: rank for rank, each in enumerate(self.workers) for ends in each["received"]}
        found: Counter[tuple[int, int]] = Counter()
        for rank, each in enumerate(self.workers):
            for (here, there), count in each["received"].items():
                if (there, here) in home:
                    found[home[there, here], rank] += count
        shares = {ends: count / self.steps / self.bytes for ends, count in found.items()}
        return {ends: share for ends, share in shares.items() if share > 0.001}

    def buckets(self, step: int) -> list[tuple[int, float, float]]:
        """On the wire in a step of worker 0: each bucket, from when to when, in the order in which they left."""
        spans = [each for each in self.traces[0] if each["name"].startswith("bucket") and each["args"]["step"] == step]
        found = [(int(each["name"].split()[1]), each["ts"], each["ts"] + each["dur"]) for each in spans]
        return sorted(found, key=lambda each: each[1])

    def backward(self, step: int) -> tuple[float, float]:
        (span,) = [each for each in self.traces[0] if each["name"] == "backward" and each["args"]["step"] == step]
        return span["ts"], span["ts"] + span["dur"]

    def starts(self) -> float:
        """When the first bucket leaves, before backward's end, in pauses: the median of all steps."""
        ends = [self.backward(step)[1] - self.buckets(step)[0][1] for step in range(1, self.steps + 1)]
        return statistics.median(ends) / 1e6 / PAUSE_S

    def grad(self) -> Tensor:
        """What the first step's exchange has made of the last layer's gradient."""
        found = self.workers[0]["grads"]["rest.4.weight"]
        assert isinstance(found, Tensor)
        return found

    def asked(self, verb: Verb, worker: int = 0) -> list[tuple[float, int, int]]:
        """Requests of a worker: when, bytes, urgency."""
        return [(at, nbytes, urgency) for at, each, nbytes, urgency in self.workers[worker]["asked"] if each == verb]

    def received(self) -> list[float]:
        """By server: bytes that a step's pushes have brought, as a share of all gradients."""
        return [server["received_bytes"] / self.steps / self.bytes for server in self.servers]

    def late(self) -> Counter[int]:
        """How many contributions were so many updates late, on all servers."""
        found: Counter[int] = Counter()
        for server in self.servers:
            for _, late, count in server["staleness"]:
                found[late] += count
        return found

    def moved(self) -> list[float]:
        """How far the model has moved in the end, in learning rates, by parameter: the sum of what was applied."""
        return sorted(map(max, zip(*(each["path"][-1] for each in self.workers), strict=True)))

    def residual(self, weight: Callable[[int], float], per_update: int = 1) -> list[float]:
        """What `moved` is where each contribution counts by how late it was."""
        rows = [sum(count * weight(late) for _, late, count in server["staleness"]) for server in self.servers]
        return sorted(row / per_update for row in rows)


@functools.cache
def seen(strategy: str, workers: int, model: type[nn.Module], steps: int, slow_s: float, momentum: float) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        env = {"WEFT_STRATEGY": strategy, "WEFT_OUT": f"{folder}/run", "WEFT_TRACE": "1", "WEFT_SAVE_EVERY": "0"}
        told = spawn(workers, train, folder, model, steps, slow_s, momentum, **env)
        files = sorted(Path(folder, "run").glob("server-*.json"))
        servers = [json.loads(file.read_text()) for file in files]
        traces = [json.loads(Path(folder, f"run/trace-{n}.json").read_text())["traceEvents"] for n in range(workers)]
        return Seen(told, servers, traces, steps)


def layers(system: str, workers: int = 2, momentum: float = 0.0) -> Seen:
    return seen(str(systems.find(system).strategy), workers, Layers, STEPS, 0.0, momentum)


def constant(system: str, workers: int = 2, momentum: float = 0.0) -> Seen:
    """With a slow worker."""
    return seen(str(systems.find(system).strategy), workers, Constant, 12, 0.04, momentum)


# --- one check a row --------------------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[], None]] = {}
"""By a row's id."""


def row(check: Callable[[], None]) -> Callable[[], None]:
    CHECKS[check.__name__] = check
    return check


def circles(run: Seen) -> bool:
    """Whether bytes go around a ring, 2 (n-1)/n of all gradients over each of its links, and nowhere else."""
    after = {source: sink for (source, sink), share in run.traffic().items() if share == pytest.approx(1.5, rel=0.05)}
    around = [0]
    while len(around) < 4:
        around.append(after[around[-1]])
    heavy = [ends for ends, share in run.traffic().items() if share > 0.05]
    return len(heavy) == 4 and sorted(around) == [0, 1, 2, 3]


def pairs(run: Seen, near: float, far: float) -> bool:
    """Whether each of four exchanges such shares with the partner beside it and the one two away, and with no other."""
    shares = {ends: share for ends, share in run.traffic().items() if share > 0.05}
    expected = {(a, a ^ 1): near for a in range(4)} | {(a, a ^ 2): far for a in range(4)}
    return shares == pytest.approx(expected, rel=0.2)


def climbs(run: Seen) -> bool:
    """Whether all gradients go up and down a binomial tree of four, once each way, and nowhere else."""
    shares = {ends: share for ends, share in run.traffic().items() if share > 0.05}
    edges = [(1, 0), (3, 2), (2, 0)]
    return shares == pytest.approx({ends: 1.0 for a, b in edges for ends in ((a, b), (b, a))}, rel=0.2)


def after_backward(run: Seen) -> bool:
    return len(run.buckets(STEPS)) == 1 and run.starts() < 0.5


def during_backward(run: Seen) -> bool:
    return run.starts() > 0.5


@row
def baidu_ring() -> None:
    assert circles(layers("baidu_ring", 4))


@row
def chainermn() -> None:
    run = layers("chainermn", 4)
    assert circles(run) and after_backward(run)
    assert all(torch.equal(each["grads"]["first.bias"], run.workers[0]["grads"]["first.bias"]) for each in run.workers)


@row
def bsp_a2a() -> None:
    assert after_backward(layers("bsp_a2a", 4))


@row
def horovod() -> None:
    run = layers("horovod", 4)
    assert circles(run) and during_backward(run)
    assert len(run.buckets(STEPS)) == 2  # the first at 1 MiB, and all else


@row
def ddp() -> None:
    run = layers("ddp", 4)
    assert circles(run) and during_backward(run)
    assert 1 < len(run.buckets(STEPS)) < 12
    assert all(torch.equal(each["grads"]["first.bias"], run.workers[0]["grads"]["first.bias"]) for each in run.workers)


@row
def wfbp_a2a() -> None:
    run = layers("wfbp_a2a", 4)
    assert circles(run) and during_backward(run)
    assert len(run.buckets(STEPS)) == 12


@row
def mg_wfbp() -> None:
    run = layers("mg_wfbp", 4)
    assert len(run.buckets(1)) == 12 and during_backward(run)
    assert len(run.buckets(STEPS)) < 12  # merged, once times were measured


@row
def caffe2() -> None:
    run = layers("caffe2", 4)
    assert pairs(run, 0.5, 1.0) and during_backward(run)
    assert len(run.buckets(STEPS)) == 12


@row
def halving_doubling() -> None:
    assert pairs(layers("halving_doubling", 4), 0.5, 1.0)


@row
def recursive_doubling() -> None:
    assert pairs(layers("recursive_doubling", 4), 1.0, 1.0)


@row
def firecaffe() -> None:
    run = layers("firecaffe", 4)
    assert climbs(run)
    assert sum(share for (_, sink), share in run.traffic().items() if sink == 0) < 2.1  # of three who would send to it


@row
def terascale_tree() -> None:
    run = layers("terascale_tree", 4)
    assert climbs(run) and after_backward(run)


@row
def bytescheduler_a2a() -> None:
    run = seen(str(systems.find("bytescheduler_a2a").strategy), 2, Wide, 8, 0.0, 0.0)
    first, last = ([bucket for bucket, *_ in run.buckets(step)] for step in (1, 8))
    ((large, parts),) = Counter(last).most_common(1)
    assert parts >= 8  # 32 MiB in parts of 4
    assert first[-1] == max(first)  # in the order of backward, until times were measured
    assert last[-1] == large < max(last)  # then the front layer overtakes


def dense(run: Seen) -> float:
    """The largest share of all gradients that a worker is sent by another in a step; 1 without compression."""
    return max(run.traffic().values(), default=0.0)


@row
def onebit_sgd() -> None:
    run = layers("onebit_sgd", 5)  # of so many, each sums up its share and encodes the sum
    assert dense(run) < 1 / 20
    assert all(len(row.unique()) == 2 for row in run.grad())  # two numbers stand for an output's entries


@row
def terngrad() -> None:
    run = layers("terngrad")
    assert dense(run) < 1 / 12
    assert 0 in run.grad() and len(run.grad().unique()) <= 9  # two workers, each with a scale times -1, 0 or 1


@row
def gradient_dropping() -> None:
    run = layers("gradient_dropping")
    assert dense(run) < 1 / 12
    assert 0.001 < (run.grad() != 0).float().mean() < 0.05  # two workers' 1 percent, by an estimated cut-off


@row
def adacomp() -> None:
    run = layers("adacomp")
    assert dense(run) < 1 / 12
    bins = run.grad().flatten()[:65500].view(-1, 500)
    assert (bins != 0).any(dim=1).all() and (run.grad() != 0).float().mean() < 0.5  # something of every bin


@row
def dgc() -> None:
    run = layers("dgc", momentum=0.9)
    assert dense(run) < 1 / 100
    assert 66 <= (run.grad() != 0).sum() <= 2 * 66  # one in a thousand of 65,536, from two workers


@row
def low_rank() -> None:
    run = layers("low_rank")
    assert dense(run) < 1 / 12
    values = torch.linalg.svdvals(run.grad().double())
    assert values[3] > 1e-4 * values[0] > 1e2 * values[4]  # rank 4


@row
def mxnet_2bit() -> None:
    assert sum(layers("mxnet_2bit").received()) == pytest.approx(2 / 16, rel=0.05)  # 2 bits of 32, from two workers
    run = seen(str(systems.find("mxnet_2bit").strategy), 2, Fading, STEPS, 0.0, 0.0)
    path = [a for a, _ in run.workers[0]["path"]]
    assert path == [1, 2, 3, 4, 5, 6]  # 2, 2, 2, 0, 0, 0, halved by two workers, go as the threshold of each


def pushes_whole(run: Seen, parts: float = 1.0) -> bool:
    """Whether servers that share the model get two workers' gradients, and each as much of them."""
    return run.received() == pytest.approx([2 * parts / len(run.servers)] * len(run.servers), rel=0.05)


def early(run: Seen) -> list[int]:
    """By step: pushes that left before backward's pause was over."""
    ends = [end for _, end in run.workers[0]["pauses"]]
    times = [at for at, *_ in run.asked(Verb.PUSH)]
    return [sum(start < at < end for at in times) for start, end in zip(run.workers[0]["computed"], ends, strict=True)]


@row
def bsp_ps() -> None:
    run = layers("bsp_ps")
    assert len(run.servers) == 2 and pushes_whole(run)
    assert early(run) == [0] * STEPS


@row
def wfbp_ps() -> None:
    run = layers("wfbp_ps")
    assert len(run.servers) == 2 and pushes_whole(run)
    assert all(count >= 10 for count in early(run))  # five of six layers


def pieces(system: str) -> tuple[Seen, list[tuple[float, int, int]]]:
    """The pushes of a step but the first, in whose course the order is learned."""
    run = seen(str(systems.find(system).strategy), 2, Wide, 3, 0.0, 0.0)
    pushes = run.asked(Verb.PUSH)
    return run, pushes[2 * len(pushes) // 3 :]


def front_first(run: Seen, pushes: list[tuple[float, int, int]]) -> bool:
    """Whether what left last, the front layer's, is the most urgent, there and back."""
    back = [urgency for _, _, urgency in run.asked(Verb.PULL)][-len(pushes) :]
    there = [urgency for _, _, urgency in sorted(pushes)]
    return there[-1] == min(there) < there[0] and min(back) == min(there)


@row
def bytescheduler_ps() -> None:
    run, pushes = pieces("bytescheduler_ps")
    assert 2000 * 2**10 < max(nbytes for _, nbytes, _ in pushes) <= 4000 * 2**10
    assert front_first(run, pushes)


@row
def p3() -> None:
    run, pushes = pieces("p3")
    assert 100_000 < max(nbytes for _, nbytes, _ in pushes) <= 200_000
    assert front_first(run, pushes)


@row
def tictac() -> None:
    run, pushes = pieces("tictac")
    assert max(nbytes for _, nbytes, _ in pushes) == 2048 * 4096 * 4 // 2  # all that one server has of it
    assert front_first(run, pushes)


@row
def caffe_on_spark() -> None:
    run = layers("caffe_on_spark")
    assert len(run.servers) == 2 and pushes_whole(run)
    assert early(run) == [0] * STEPS


@row
def bigdl() -> None:
    run = layers("bigdl")
    assert len(run.servers) == 2 and pushes_whole(run, 0.5)
    assert early(run) == [0] * STEPS


@row
def mxnet() -> None:
    run = layers("mxnet", 4)
    servers, proxies = run.received()[:2], run.received()[2:]
    assert proxies == pytest.approx([2, 2], rel=0.05)  # each sums up two workers' gradients
    assert servers == pytest.approx([1, 1], rel=0.05)  # of two groups, and not of four workers


@row
def hogwild() -> None:
    run = constant("hogwild")
    assert not run.servers and not run.traffic()
    assert all(each["shared"] for each in run.workers)
    assert 12 < run.moved()[0] <= 24  # each sees the other's updates


@row
def downpour() -> None:
    run = constant("downpour")
    assert run.moved() == [24, 24] and max(run.late()) > 0
    assert len(run.asked(Verb.PUSH)) == 24 and len(run.asked(Verb.PULL)) >= 24  # in every step, of two servers
    quick, slow = run.workers[0]["computed"], run.workers[1]["computed"]
    assert quick[-1] < slow[-2]  # at its own pace


def ahead(run: Seen) -> int:
    """How many steps the quick worker was ahead when it began one, at most; counted from what the slow one computed."""
    done = run.workers[1]["computed"]
    return max(step - sum(at < began for at in done) for step, began in enumerate(run.workers[0]["forwards"]))


@row
def ssp() -> None:
    assert 1 < ahead(constant("ssp")) <= 3


@row
def cui2014() -> None:
    run = constant("cui2014")
    assert 0 < max(run.late()) <= 2 * (3 + 1)
    assert any(who == 0 and on == 1 and seconds > 0.05 for who, on, seconds in run.servers[0]["waits"])


@row
def essp() -> None:
    run = constant("essp")
    assert 1 < ahead(run) <= 3
    assert len(run.asked(Verb.WATCH)) > len(run.asked(Verb.PULL))  # sent without being asked for, after the start


@row
def dynsgd() -> None:
    run = constant("dynsgd")
    assert max(run.late()) > 0
    assert run.moved() == pytest.approx(run.residual(lambda late: 1 / (late + 1)))


@row
def n_softsync() -> None:
    run = constant("n_softsync", 4)
    assert [server["updates"] for server in run.servers] == [24, 24]  # two of four workers' 48 contributions make one
    assert run.moved() == pytest.approx(run.residual(lambda late: 1 / (late + 1), per_update=2))


@row
def dc_asgd() -> None:
    run = constant("dc_asgd")
    assert max(run.late()) > 0
    assert run.moved() == pytest.approx(run.residual(lambda late: 1 - 0.04 * RATE * late), rel=1e-3)
    assert run.moved()[0] < 24 * (1 - 1e-3)


@row
def implicit_momentum() -> None:
    run = constant("implicit_momentum", momentum=0.9)
    steps = [sum(0.4**k for k in range(update)) for update in range(1, 25)]  # 0.9 - (1 - 1/2)
    assert run.moved() == pytest.approx([sum(steps)] * 2, rel=1e-5)


@row
def backup_workers() -> None:
    run = constant("backup_workers")
    assert set(run.late()) == {0}
    assert run.late().total() < 48  # of two workers' 12 steps, on two servers: late ones were dropped
    assert run.moved() == [server["updates"] for server in run.servers]


RUNS = [each.id for each in systems.catalogue() if each.status == "runs"]


def test_every_row_that_runs_has_a_check_of_its_own() -> None:
    assert sorted(CHECKS) == sorted(RUNS)


@pytest.mark.parametrize("system", RUNS)
def test_the_mechanism_is_seen(system: str) -> None:
    CHECKS[system]()
