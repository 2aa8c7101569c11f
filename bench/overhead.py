"""What Weft costs beside the plain thing, by interleaved pairs of blocks.

    python bench/overhead.py                 one process against the plain loop; two workers against DDP
    python bench/overhead.py --gpu           one process with NCCL on a GPU, `text` at 350m, bf16 autocast
    python bench/overhead.py --exactness     direct against ring, two workers

Each pair has fresh processes, in which blocks of steps with the one and the other loop alternate, on the same data; the
figure is the median ratio of the pairs' median steps with a bootstrap interval of 95 %. The same reference against
itself stands beside it: a figure within that noise says nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.jobs import text, wide
from weft.jobs._common import cross_entropy
from weft.runtime import run as runtime
from weft.runtime.launch.world import World

BLOCKS = 4
Loop = Callable[[int], list[float]]
"""Runs so many steps and returns the seconds of each."""


def setup(job: str, size: str, batch: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
    """A fresh model with its optimizer, and a few batches in memory: the loader is not what is measured."""
    torch.manual_seed(0)
    module = {"text": text, "wide": wide}[job]
    model = module.build(size).to(device)
    train, _ = module.data(size, 0)
    samples = [train[i] for i in range(batch * 4)]
    groups = [samples[at : at + batch] for at in range(0, len(samples), batch)]
    batches = [tuple(torch.stack(part).to(device) for part in zip(*group, strict=True)) for group in groups]
    if job == "text":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4), batches
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), batches


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, half: bool, device: torch.device) -> Loop:
    cast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=half)

    def run(steps: int) -> list[float]:
        times = []
        source = iter(batches())
        for _ in range(steps):
            x, y = next(source)
            began = time.perf_counter()
            with cast:
                loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return times

    return run


def cycle(batches: list[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def compare(loops: dict[str, Loop], steps: int, warmup: int, turn: int) -> dict[str, float]:
    """The median step of each loop, in blocks that alternate; each block's first step is left out."""
    names = list(loops)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        loops[name](warmup)
    for block in range(BLOCKS):
        at = (turn + block) % len(names)
        for name in names[at:] + names[:at]:
            times[name] += loops[name](1 + steps // BLOCKS)[1:]
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """The median of paired ratios with its bootstrap interval."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    rng = random.Random(0)
    boots = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": statistics.median(ratios),
        "low": boots[50],
        "high": boots[1949],
        "iqr": quartiles[2] - quartiles[0],
        "pairs": len(ratios),
    }


@contextlib.contextmanager
def cpu_share() -> Iterator[dict[str, float]]:
    """The share of the machine's processor time that was used, and stolen, meanwhile."""

    def read() -> list[int]:
        return [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]

    before, found = read(), {}
    yield found
    spent = [after - was for after, was in zip(read(), before, strict=True)]
    found |= {"cpu": 1 - spent[3] / max(1, sum(spent)), "steal": spent[7] / max(1, sum(spent))}


# --- one process ----------------------------------------------------------------------------------------------------


Build = Callable[[], Loop]


def ours(args: argparse.Namespace, strategy: str, out: Path | None, *what: Any) -> Build:
    """A loop under Weft, in a run among others on the same process group, which a job never has."""

    def build() -> Loop:
        runtime._current = None
        run = weft.init(strategy, device="cuda" if args.gpu else "cpu", out=out, save_every=0, data="own")
        model, optimizer, batches = setup(*what, run.device)
        model, optimizer = run.distribute(model, optimizer)
        return loop(model, optimizer, lambda: cycle(batches), args.half, run.device)

    return build


def theirs(args: argparse.Namespace, wrap: Callable[[nn.Module], nn.Module], *what: Any) -> Build:
    """The plain loop, or one under another wrapper."""

    def build() -> Loop:
        device = torch.device("cuda" if args.gpu else "cpu")
        model, optimizer, batches = setup(*what, device)
        return loop(wrap(model), optimizer, lambda: cycle(batches), args.half, device)

    return build


def one_process(args: argparse.Namespace, job: str, size: str, batch: int) -> list[dict[str, Any]]:
    """Hooks, buckets and collectives forced on, with and without a run folder, against the plain loop."""
    medians, share = in_processes(args, 1, _alone, job, size, batch)
    what = f"one process, {job} {size}, {'cuda' if args.gpu else 'cpu'}" + (", bf16 autocast" if args.half else "")
    recorded = rows(what, medians, "weft", "weft unrecorded", share, again=False)
    return rows(what, medians, "weft", "plain", share) + recorded


def _alone(folder: str, args: argparse.Namespace, job: str, size: str, batch: int) -> dict[str, Build]:
    return {
        "weft": ours(args, "bsp / ring / fused", Path(folder) / "run", job, size, batch),
        "plain": theirs(args, lambda model: model, job, size, batch),
        "weft unrecorded": ours(args, "bsp / ring / fused", None, job, size, batch),
        "plain again": theirs(args, lambda model: model, job, size, batch),
    }


def rows(
    what: str, medians: dict[str, list[float]], ours: str, reference: str, share: dict[str, float], again: bool = True
) -> list[Any]:
    return [
        {"what": what, "ours": name, "reference": reference}
        | ratio(medians[name], medians[reference])
        | {"ours_s": statistics.median(medians[name]), "reference_s": statistics.median(medians[reference])}
        | share
        for name in ((ours, f"{reference} again") if again else (ours,))
    ]


# --- two workers ----------------------------------------------------------------------------------------------------


def two_workers(
    args: argparse.Namespace, job: str, size: str, batch: int, strategies: list[str]
) -> list[dict[str, Any]]:
    """Two local processes, each with Weft and DistributedDataParallel on the same process group."""
    medians, share = in_processes(args, 2, _beside_ddp, job, size, batch, strategies)
    what = f"two workers, {job} {size}, cpu"
    return [row for strategy in strategies for row in rows(what, medians, strategy, "ddp", share)]


def _beside_ddp(
    folder: str, args: argparse.Namespace, job: str, size: str, batch: int, strategies: list[str]
) -> dict[str, Build]:
    def ddp(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)

    runs = {
        strategy: ours(args, strategy, Path(folder) / f"run-{number}", job, size, batch)
        for number, strategy in enumerate(strategies)
    }
    return runs | {name: theirs(args, ddp, job, size, batch) for name in ("ddp", "ddp again")}


# --- fresh processes for every pair ---------------------------------------------------------------------------------


def in_processes(args: argparse.Namespace, count: int, make: Callable[..., Any], *what: Any) -> tuple[Any, Any]:
    """Each pair in processes of its own: where a model lies in memory is worth several percent (not on a GPU)."""
    context = multiprocessing.get_context("spawn")
    medians: dict[str, list[float]] = {}
    with cpu_share() as share:
        for pairs in [range(args.pairs)] if args.gpu else [range(p, p + 1) for p in range(args.pairs)]:
            with tempfile.TemporaryDirectory() as folder:
                places = [(rank, count, folder, pairs, args, make, what) for rank in range(count)]
                children = [context.Process(target=_child, args=place) for place in places]
                for child in children:
                    child.start()
                for child in children:
                    child.join()
                for each in json.loads(Path(folder, "medians.json").read_text()):
                    for name, median in each.items():
                        medians.setdefault(name, []).append(median)
    return medians, share


def _child(
    rank: int, count: int, folder: str, pairs: range, args: argparse.Namespace, make: Callable[..., Any], what: Any
) -> None:
    if not args.gpu:
        torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "WEFT_STORE": f"{folder}/store"}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["WEFT_FORCE"] = "1"
    World.here().connect(torch.device("cuda", 0) if args.gpu else torch.device("cpu"), timeout_s=120)
    World.connect = lambda *_, **__: None  # type: ignore[method-assign]
    builds = list(make(folder, args, *what).items())
    at = pairs[0] % len(builds)
    loops = {name: build() for name, build in builds[at:] + builds[:at]}  # who comes first lies elsewhere in memory
    medians = [compare(loops, args.steps, args.warmup, pair) for pair in pairs]
    if rank == 0:
        Path(folder, "medians.json").write_text(json.dumps(medians))
    dist.barrier()
    os._exit(0)


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if args.gpu:
        yield from one_process(args, "text", "350m", 16)
        return
    torch.set_num_threads(1)
    for job in args.jobs:
        size, batch = {"text": ("2m", 8), "wide": ("25m", 32)}[job]
        if not args.exactness:
            yield from one_process(args, job, size, batch)
        strategies = ["bsp / ring / fused"] + (["bsp / direct / fused"] if args.exactness else [])
        yield from two_workers(args, job, size, batch, strategies)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--exactness", action="store_true")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--jobs", nargs="+", default=["text", "wide"])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    args.half = args.gpu
    found = []
    for row in measured(args):
        found.append(row)
        print(
            f"{row['what']:45} {row['ours']:20} / {row['reference']:15} {row['ratio']:.4f} "
            f"[{row['low']:.4f}, {row['high']:.4f}] iqr {row['iqr']:.4f}, {row['ours_s'] * 1e3:.1f} ms against "
            f"{row['reference_s'] * 1e3:.1f}, cpu {row['cpu']:.0%}, steal {row['steal']:.1%}, {row['pairs']} pairs",
            flush=True,
        )
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": found}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
