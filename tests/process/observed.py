"""The messages of a run as they leave and arrive, by which the mechanism of a system is recognised."""

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

import torch
from torch import Tensor, nn

import weft
from tests.process.harness import spawn
from weft import systems
from weft.runtime.record.run_folder import events
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


class Ranked(Constant):
    """Four layers of one parameter, whose gradients are 1 on worker 0, 2 on worker 1, and so on."""

    def __init__(self) -> None:
        super().__init__()
        del self.a, self.b
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(4))
        for p in self.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        return sum(p.sum() for p in self.parameters()) * x.mean()  # type: ignore[return-value]


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
        if kind is Ranked:
            return [torch.full((8,), 1.0 + at % workers) for at in range(steps * workers)]
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
    events: list[dict[str, Any]]
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

    def merges(self) -> list[int]:
        """The steps after which worker 0 used a merge of models."""
        return [event["step"] for event in self.events if event.get("merges")]

    def path(self, worker: int, layer: int = 0) -> list[float]:
        """How far a worker's copy has moved after each step, in learning rates; before the first step it is at 0."""
        return [0.0, *(step[layer] for step in self.workers[worker]["path"])]

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
        return Seen(told, servers, traces, events(Path(folder, "run")), steps)


def layers(system: str, workers: int = 2, momentum: float = 0.0) -> Seen:
    return seen(str(systems.find(system).strategy), workers, Layers, STEPS, 0.0, momentum)


def ranked(system: str, steps: int) -> Seen:
    """Two workers with different gradients; on average theirs is 1.5."""
    return seen(str(systems.find(system).strategy), 2, Ranked, steps, 0.0, 0.0)


def constant(system: str, workers: int = 2, momentum: float = 0.0) -> Seen:
    """With a slow worker."""
    return seen(str(systems.find(system).strategy), workers, Constant, 12, 0.04, momentum)
