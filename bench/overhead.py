"""What Weft costs beside the plain thing, by interleaved pairs of blocks.

    python bench/overhead.py                 one process against the plain loop; two workers against DDP
    python bench/overhead.py --gpu           one process with NCCL on a GPU, `text` at 350m, bf16 autocast
    python bench/overhead.py --exactness     direct against ring, two workers

Each pair is a block of steps with one loop and a block with the other, in alternating order, in the same processes and
on the same data; the figure is the median ratio of the pairs' median steps with a bootstrap interval of 95 %. The same
reference against itself stands beside it: a figure within that noise says nothing.
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

import weft
from weft.jobs import text, wide
from weft.jobs._common import cross_entropy
from weft.runtime import worker

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


def compare(loops: dict[str, Loop], pairs: int, steps: int, warmup: int) -> dict[str, list[float]]:
    """Median step of each block, by loop; blocks interleaved, the order turned round from pair to pair."""
    for run in loops.values():
        run(warmup)
    medians: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for pair in range(pairs):
        for name in names if pair % 2 == 0 else reversed(names):
            loops[name](1)
            medians[name].append(statistics.median(loops[name](steps)))
    return medians


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


def join(strategy: str, device: str, out: Path | None) -> weft.Run:
    """A run among others in the same processes and the same group, which a job never has."""
    worker._current = None
    if dist.is_initialized():
        worker.World.connect = lambda *_, **__: None  # type: ignore[method-assign]
    return weft.init(strategy, device=device, out=out)


def one_process(args: argparse.Namespace, job: str, size: str, batch: int) -> list[dict[str, Any]]:
    """Hooks, buckets and collectives forced on, with and without a run folder, against the plain loop."""
    loops: dict[str, Loop] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"WEFT_FORCE": "1", "WEFT_STORE": f"{folder}/store", "RANK": "0", "WORLD_SIZE": "1"}
        for name, out in (("weft", Path(folder) / "run"), ("weft unrecorded", None)):
            run = join("bsp / ring / fused", "cuda" if args.gpu else "cpu", out)
            model, optimizer, batches = setup(job, size, batch, run.device)
            model, optimizer = run.distribute(model, optimizer)
            loops[name] = loop(model, optimizer, lambda batches=batches: cycle(batches), args.half, run.device)
        for name in ("plain", "plain again"):
            model, optimizer, batches = setup(job, size, batch, run.device)
            loops[name] = loop(model, optimizer, lambda batches=batches: cycle(batches), args.half, run.device)
        with cpu_share() as share:
            medians = compare(loops, args.pairs, args.steps, args.warmup)
        dist.destroy_process_group()
    what = f"one process, {job} {size}, {run.device.type}" + (", bf16 autocast" if args.half else "")
    recorded = rows(what, medians, "weft", "weft unrecorded", share, again=False)
    return rows(what, medians, "weft", "plain", share) + recorded


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
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        children = [
            context.Process(target=_worker, args=(rank, folder, args, job, size, batch, strategies))
            for rank in range(2)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
        return json.loads(Path(folder, "rows.json").read_text())  # type: ignore[no-any-return]


def _worker(
    rank: int, folder: str, args: argparse.Namespace, job: str, size: str, batch: int, strategies: list[str]
) -> None:
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "WEFT_STORE": f"{folder}/store", "GLOO_SOCKET_IFNAME": "lo"}
    loops: dict[str, Loop] = {}
    device = torch.device("cpu")
    for number, strategy in enumerate(strategies):
        run = join(strategy, "cpu", Path(folder) / f"run-{number}")
        model, optimizer, batches = setup(job, size, batch, device)
        model, optimizer = run.distribute(model, optimizer)
        loops[strategy] = loop(model, optimizer, lambda batches=batches: cycle(batches), args.half, device)
    for name in ("ddp", "ddp again"):
        model, optimizer, batches = setup(job, size, batch, device)
        model = DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)
        loops[name] = loop(model, optimizer, lambda batches=batches: cycle(batches), args.half, device)
    with cpu_share() as share:
        medians = compare(loops, args.pairs, args.steps, args.warmup)
    if rank == 0:
        found = [
            row
            for strategy in strategies
            for row in rows(f"two workers, {job} {size}, cpu", medians, strategy, "ddp", share)
        ]
        Path(folder, "rows.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--exactness", action="store_true")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--jobs", nargs="+", default=["text", "wide"])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    args.half = args.gpu
    found = []
    if args.gpu:
        found += one_process(args, "text", "350m", 16)
    else:
        torch.set_num_threads(1)
        for job in args.jobs:
            size, batch = {"text": ("2m", 8), "wide": ("25m", 32)}[job]
            if not args.exactness:
                found += one_process(args, job, size, batch)
            strategies = ["bsp / ring / fused"] + (["bsp / direct / fused"] if args.exactness else [])
            found += two_workers(args, job, size, batch, strategies)
    for row in found:
        print(
            f"{row['what']:45} {row['ours']:20} / {row['reference']:15} {row['ratio']:.4f} "
            f"[{row['low']:.4f}, {row['high']:.4f}] iqr {row['iqr']:.4f}, {row['ours_s'] * 1e3:.1f} ms against "
            f"{row['reference_s'] * 1e3:.1f}, cpu {row['cpu']:.0%}, steal {row['steal']:.1%}, {row['pairs']} pairs"
        )
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": found}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
