"""What safety costs: asynchronous checkpoints, checks of every value, and the disk's own speed.

    python bench/saving.py stall     steps behind a save against steps without one, in blocks of 20, in a run of `wide`
    python bench/saving.py guard     steps with finite checks and hashes against steps without, the same way
    python bench/saving.py disk      a checkpoint of 1 GiB, written and read, against dd in the same minute

Blocks alternate within one run, so that both kinds see the same machine. Real compute; by default four emulated hosts
at 1 Gbit/s, with --local plain processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.runtime.record.run_folder import events
from weft.store import checkpoint
from weft.store.checkpoint import Manifest

sys.path.insert(0, str(Path(__file__).parent))
from overhead import cpu_share

BLOCK = 20
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("stall", "guard", "disk"))
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--strategy", default="bsp / direct")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--local", action="store_true")
    args = parser.parse_args()
    {"stall": stall, "guard": guard, "disk": disk}[args.what](args)


def train(args: argparse.Namespace, job: str, folder: Path, every: int, warmup: int) -> list[dict[str, Any]]:
    steps = warmup + 2 * BLOCK * args.pairs
    place = ["-n", str(args.workers)] if args.local else ["--hosts", str(args.workers), "--bandwidth", "1gbit"]
    command = [sys.executable, "-m", "weft.cli", "train", job, *place, "--strategy", args.strategy]
    command += ["--steps", str(steps), "--save-every", str(every), "--out", str(folder)]
    with cpu_share() as share:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(f"`{' '.join(command[2:])}`; real compute, CPU {share['cpu']:.0%}, steal {share['steal']:.1%}")
    return events(folder)[warmup:]


def compare(name: str, rows: list[dict[str, Any]]) -> None:
    """Blocks of the first kind, which have something more to do, against those of the second."""
    blocks = [rows[at : at + BLOCK] for at in range(0, len(rows), BLOCK)]
    means = [statistics.mean(row["step_s"] for row in block) for block in blocks]
    more, less = means[::2], means[1::2]
    ratios = sorted(a / b for a, b in zip(more, less, strict=True))
    itself = sorted(max(a, b) / min(a, b) for a, b in zip(less[::2], less[1::2], strict=False))
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"| {name} | mean step, ms | ratio of pairs, median | quartiles | without, against itself |")
    print("|---|---|---|---|---|")
    cells = [f"{len(ratios)} pairs", f"{statistics.mean(more) * 1e3:.1f}, without {statistics.mean(less) * 1e3:.1f}"]
    cells += [f"{statistics.median(ratios):.4f}", f"{low:.4f} to {high:.4f}", f"{statistics.median(itself):.4f}"]
    print("| " + " | ".join(cells) + " |")


def stall(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        rows = train(args, "wide", Path(scratch) / "run", 2 * BLOCK, 2 * BLOCK)
        size = sum(file.stat().st_size for file in checkpoint.found_in(Path(scratch) / "run/checkpoints")[0].iterdir())
    held = [row["save_s"] for row in rows if "save_s" in row]
    step = statistics.median(row["step_s"] for row in rows)
    print(f"{len(held)} saves of {size / 1e6:.0f} MB, one for every {BLOCK} of the steps behind them")
    print(f"the loop was held up {statistics.median(held) * 1e3:.1f} ms, {max(held) * 1e3:.1f} at most;", end=" ")
    print(f"{statistics.mean(held) / BLOCK / step:.2%} of a step on average")
    compare("a save every 20 steps", rows)


def guard(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        os.environ["GUARD_TIMES"] = times = str(Path(scratch).absolute() / "times.json")
        rows = train(args, str(Path(__file__).with_name("guard_job.py")), Path(scratch) / "run", 0, BLOCK)
        spent = json.loads(Path(times).read_text())
    each, step = spent["seconds"] / spent["steps"], statistics.median(row["step_s"] for row in rows)
    print(f"inside of the guard {each * 1e3:.2f} ms a step, {each / step:.2%} of it; a hash every {BLOCK} steps")
    compare("finite checks and hashes", rows)


# --- the disk ---------------------------------------------------------------------------------------------------------


def disk(args: argparse.Namespace) -> None:
    tensors = {f"w{i}": torch.randn(GIB // 4 // 8) for i in range(8)}
    rates: dict[str, list[float]] = {name: [] for name in ("dd write", "ours write", "dd read", "ours read")}
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        folder = Path(scratch)
        for pair in range(args.pairs):
            acts = {
                "dd write": lambda: dd("if=/dev/zero", f"of={folder}/dd", "conv=fsync"),
                "ours write": lambda: save(folder / "ours", tensors),
            }
            for name in sorted(acts, reverse=pair % 2 == 1):  # whoever comes second finds the disk busy
                rates[name].append(rate(acts[name]))
            for file in (folder / "dd", *(folder / "ours/step-00000001").iterdir()):
                forget(file)
            acts = {
                "dd read": lambda: dd(f"if={folder}/dd", "of=/dev/null"),
                "ours read": lambda: load(folder / "ours"),
            }
            for name in sorted(acts, reverse=pair % 2 == 1):
                rates[name].append(rate(acts[name]))
            (folder / "dd").unlink()
            shutil.rmtree(folder / "ours")
    print("| | GB/s, median | lowest to highest | of dd, median of pairs |")
    print("|---|---|---|---|")
    for name, found in rates.items():
        theirs = rates["dd " + name.split()[1]]
        share = statistics.median(a / b for a, b in zip(found, theirs, strict=True))
        print(f"| {name} | {statistics.median(found):.2f} | {min(found):.2f} to {max(found):.2f} | {share:.2f} |")


def rate(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return GIB / 1e9 / (time.perf_counter() - began)


def dd(*words: str) -> None:
    subprocess.run(["dd", *words, "bs=16M", "count=64"], check=True, capture_output=True)


def save(root: Path, tensors: dict[str, torch.Tensor]) -> None:
    part = checkpoint.aside(root, 1, "bench")
    checkpoint.contribute(part, 0, {"model-0-of-1.safetensors": tensors}, {})
    about: dict[str, Any] = {"workers": 1, "strategy": "bsp / direct", "seed": 0, "job": {}, "files": {}, "state": {}}
    checkpoint.publish(root, part, 1, Manifest(step=1, **about), 10.0)


def load(root: Path) -> None:
    folder = checkpoint.found_in(root)[0]
    checkpoint.load(folder, checkpoint.read_manifest(folder), ["model"])


def forget(path: Path) -> None:
    """Out of the page cache, so that the disk itself is read."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
