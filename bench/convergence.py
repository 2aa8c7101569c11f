"""What compressing does to learning, and merging models instead of gradients.

Held-out losses of `text` with 2 M parameters after 1,000 steps on 4 workers:

    python bench/convergence.py FOLDER --parallel 4      every row, so many runs at once; goes on where it stopped
    python bench/convergence.py FOLDER --processes 1     four workers carried by one process, as on one GPU
    python bench/convergence.py FOLDER --table           the table of what is there

Each compressor has its paper's settings; dense with the same optimizer, seeds and learning rate stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SGD = ("--optimizer", "sgd", "--lr", "0.1", "--clip", "1.0")
GENTLE = ("--optimizer", "sgd", "--lr", "0.03", "--clip", "1.0")
UNCLIPPED = ("--optimizer", "sgd", "--lr", "0.1")
THREE, ONE = (0, 1, 2), (0,)


@dataclass(frozen=True)
class Row:
    compression: str
    seeds: tuple[int, ...] = ONE
    options: tuple[str, ...] = ()
    optimization: str = "gradient"

    @property
    def strategy(self) -> str:
        return f"{self.optimization} / bsp / direct / {self.compression}"

    @property
    def name(self) -> str:
        merged = () if self.optimization == "gradient" else (self.optimization,)
        return " / ".join([*merged, self.compression])


ROWS = [
    Row("dense", THREE),
    Row("int8", THREE),
    Row("qsgd(levels=16)", THREE),
    Row("qsgd(levels=3, norm=max)", THREE),
    Row("error_feedback(onebit)", THREE),
    Row("error_feedback(powersgd(rank=4))", THREE),
    Row("error_feedback(topk(ratio=0.01))", THREE),
    Row("dense", THREE, SGD),
    Row("dgc(ratio=0.01)", THREE, SGD),
    Row("cast"),
    Row("int8(stochastic=true)"),
    Row("qsgd(levels=7)"),
    Row("terngrad"),
    Row("sign"),
    Row("error_feedback(sign(scaled=true))"),
    Row("onebit"),
    Row("topk(ratio=0.01)"),
    Row("error_feedback(topk(ratio=0.001))"),
    Row("error_feedback(twobit(threshold=0.5))"),
    Row("error_feedback(twobit(threshold=0.001))"),
    Row("error_feedback(threshold(tau=0.001))"),
    Row("error_feedback(gradient_dropping(drop=0.99))"),
    Row("error_feedback(adacomp(bin=500))"),
    Row("error_feedback(random_k(ratio=0.01))"),
    Row("error_feedback(significant)"),
    Row("qsgd(levels=7, norm=max)", THREE),
    Row("qsgd(levels=3, bucket=64, norm=max)", THREE),
    Row("qsgd(levels=7, bucket=128, norm=max)", THREE),
    Row("qsgd(levels=1, norm=max)"),
    Row("error_feedback(powersgd(rank=16))"),
    Row("dgc(ratio=0.001, warmup=200)", ONE, SGD),
    Row("dense", ONE, GENTLE),
    Row("error_feedback(onebit)", ONE, GENTLE),
    Row("error_feedback(powersgd(rank=4))", ONE, GENTLE),
    Row("error_feedback(topk(ratio=0.01))", ONE, GENTLE),
    Row("dense", ONE, UNCLIPPED),
    Row("dgc(ratio=0.01, warmup=200, clip=0.25)", ONE, UNCLIPPED),
    *(Row("dense", ONE, (), f"average(every={every})") for every in (1, 8, 40, 100)),
    *(Row("dense", ONE, (), f"outer(every={every})") for every in (1, 8, 40, 100)),
    *(Row("dense", ONE, (), f"block_momentum(every={every})") for every in (8, 40)),
    *(Row("dense", ONE, (), f"streaming(every={every})") for every in (40, 100)),
    Row("dense", ONE, (), "sma(every=8)"),
    Row("dense", ONE, (), "post_local(every=40, switch_at=200)"),
    Row("int8", ONE, (), "outer(every=40)"),
    Row("qsgd(levels=7, norm=max)", ONE, (), "outer(every=40)"),
    Row("error_feedback(onebit)", ONE, (), "outer(every=40)"),
    Row("error_feedback(topk(ratio=0.01))", ONE, (), "outer(every=40)"),
]


def runs(folder: Path, only: Sequence[str] = ()) -> Iterator[tuple[Row, int, Path]]:
    for row in (row for row in ROWS if not only or row.name in only):
        for seed in row.seeds:
            name = "".join(c if c.isalnum() else "_" for c in " ".join([row.name, *row.options]))
            yield row, seed, folder / f"{name}-{seed}"


def train(row: Row, seed: int, out: Path, steps: int, processes: int) -> None:
    if (out / "report.json").exists():
        return
    command = [sys.executable, "-m", "weft.cli", "train", "text", "-n", "4", "--steps", str(steps), "--seed", str(seed)]
    command += ["--processes", str(processes), "--strategy", row.strategy]
    command += ["--save-every", "0", "--out", str(out), "--"]
    command += ["--size", "2m", *row.options]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    outcome = "ended" if done.returncode == 0 else done.stderr[-500:]
    print(f"{row.name} {' '.join(row.options)} seed {seed}: {outcome}", flush=True)


def table(folder: Path) -> None:
    losses: dict[Row, list[float]] = {}
    for row, _, out in runs(folder):
        if (out / "report.json").exists():
            losses.setdefault(row, []).append(json.loads((out / "report.json").read_text())["held_out_loss"])
    print("| | optimizer | seeds | held-out loss, mean | lowest to highest | of dense |")
    print("|---|---|---|---|---|---|")
    for row, found in losses.items():
        beside = next((losses[each] for each in losses if each.name == "dense" and each.options == row.options), [])
        ratio = f"{statistics.mean(found) / statistics.mean(beside[: len(found)]):.4f}" if beside else ""
        optimizer = " ".join(row.options).replace("--", "") or "adamw lr 0.001"
        print(
            f"| `{row.name}` | {optimizer} | {len(found)} | {statistics.mean(found):.4f} "
            f"| {min(found):.4f} to {max(found):.4f} | {ratio} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--processes", type=int, default=4, help="that carry the four workers of a run")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="some rows, named as in the table")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if not args.table:
        with ThreadPoolExecutor(args.parallel) as pool:
            for waiting in [
                pool.submit(train, *each, args.steps, args.processes) for each in runs(args.folder, args.only)
            ]:
                waiting.result()
    table(args.folder)


if __name__ == "__main__":
    sys.exit(main())
