"""Slow workers, and ways of not waiting for them: sleeping compute, as many server hosts as workers.

    python bench/stragglers.py                    one worker 4x slow for good; all of them in a tenth of their steps

A worker's own rate is measured among equally fast peers, under asp. `of own` is the samples a second of all workers
over the sum of their own rates. The model is small, so that communication hides behind computing of 300 ms a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import weft
from weft.lab.instruments.straggler import Slow
from weft.profile import Profile

COMPUTE_S = 0.3
SAMPLES = 32
"""In a worker's batch."""
SERVERS = "parameter_server(servers=0)"
WAYS = ("bsp", "backup(spares=1)", "ssp(slack=4)", "asp", "softsync(n=4)", "value_bound(delta=1)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/stragglers"))
    args = parser.parse_args()
    first = run(args, "fast", ("asp", "bsp"))
    own, together = first["asp"]["samples_per_s"] / 4, first["bsp"]
    slow = run(args, "slow", ("asp",), slow=("all=4x",))["asp"]["samples_per_s"] / 4
    three = run(args, "three", ("bsp",), hosts=3)["bsp"]
    print(f"own rate: {own:.1f} samples/s, 4x slow {slow:.1f}; bsp, nobody slow: {ms(together)}; three: {ms(three)}\n")
    heads = ("slow", "synchrony", "mean step, ms", "worker 0's", "samples/s", "of own", "worker 0's, of three's")
    print("| " + " | ".join((*heads, "staleness", "waited most")) + " |")
    print("|---|---|---|---|---|---|---|---|---|")
    cases = (("worker 3, 4x", "3=4x", 3 * own + slow), ("all, 4x in 10 %", "all=4x@10%", drawn(own, args.steps)))
    for name, who, most in cases:
        for way, row in run(args, name[:3], WAYS, slow=(who,)).items():
            seen = row["asynchrony"]
            waiter, blamed, seconds = seen["longest_wait"]
            wait = f"{waiter}, {seconds:.0f} s for {blamed}"
            late = f"{seen['staleness_mean']:.2f}"
            first, means = looked(args.out / name[:3] / f"{WAYS.index(way) + 1:02d}-seed0")
            rate = sum(SAMPLES / mean for mean in means)
            cells = [name, way, ms(row), f"{first * 1e3:.0f}", f"{rate:.1f}", f"{rate / most:.3f}"]
            cells.append(f"{first / three['step_s']:.2f}")
            print("| " + " | ".join([*cells, late, wait]) + " |", flush=True)


def drawn(own: float, steps: int) -> float:
    """The sum of own rates with the slow steps that were drawn for each worker."""
    slow = Slow.parse("4x@10%")
    factors = [statistics.mean(slow.at(0, rank, step) for step in range(5, steps)) for rank in range(4)]
    return sum(own / factor for factor in factors)


def run(args: argparse.Namespace, name: str, ways: tuple[str, ...], **how: Any) -> dict[str, Any]:
    result = weft.compare(
        "wide",
        {way: f"{way} / {SERVERS} / priority" for way in ways},
        args=("--size", "1m"),
        compute="sleep",
        profile=profile(args.out),
        steps=args.steps,
        seeds=args.seeds,
        out=args.out / name,
        **how,
    )
    for row in result.rows:
        if row["error"]:
            raise SystemExit(f"{row['name']}: {row['error']}")
    return {row["name"]: row for row in result.rows}


def profile(out: Path) -> Profile:
    """The job's own, measured once, made as long as wanted."""
    file = out / "measured" / "profile.json"
    if not file.exists():
        weft.compare("wide", "bsp / direct", args=("--size", "1m"), compute="sleep", steps=10, seeds=1, out=file.parent)
    known = Profile.read(file)
    return known.scaled(COMPUTE_S / known.compute_s)


def looked(folder: Path) -> tuple[float, list[float]]:
    """The median step of worker 0, who is not slow for good, and every worker's mean step."""
    steps = []
    for file in sorted(folder.glob("events-*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        steps.append([event["step_s"] for event in lines[5:]])
    return statistics.median(steps[0]), [statistics.mean(each) for each in steps]


def ms(row: dict[str, Any]) -> str:
    return f"{row['step_s'] * 1e3:.0f} ± {row['step_s_spread'] * 1e3:.0f}"


if __name__ == "__main__":
    main()
