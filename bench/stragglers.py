"""Slow workers, and ways of not waiting for them: sleeping compute, as many server hosts as workers.

    python bench/stragglers.py                    one worker 4x slow for good; all of them in a tenth of their steps

A worker's own rate is measured among equally fast peers, under asp. `of own` is the samples a second of all workers
over the sum of their own rates. The model is small, so that communication hides behind computing of 300 ms a step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import weft
from weft.profile import Profile

COMPUTE_S = 0.3
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
    print("| slow | synchrony | step, ms | samples/s | of own | of three workers' bsp step | staleness | waited most |")
    print("|---|---|---|---|---|---|---|---|")
    cases = (("worker 3, 4x", "3=4x", 3 * own + slow), ("all, 4x in 10 %", "all=4x@10%", 4 * typical(own)))
    for name, who, most in cases:
        for way, row in run(args, name[:3], WAYS, slow=(who,)).items():
            seen = row["asynchrony"]
            waiter, blamed, seconds = seen["longest_wait"]
            wait = f"{waiter}, {seconds:.0f} s for {blamed}"
            late = f"{seen['staleness_mean']:.2f}"
            share = f"{row['samples_per_s'] / most:.3f}"
            cells = [name, way, ms(row), f"{row['samples_per_s']:.1f}", share, f"{row['step_s'] / three['step_s']:.2f}"]
            print("| " + " | ".join([*cells, late, wait]) + " |", flush=True)


def typical(own: float) -> float:
    """A worker that is 4x slow in a tenth of its steps takes 1.3 times as long on average."""
    return own / (0.9 + 0.1 * 4)


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


def ms(row: dict[str, Any]) -> str:
    return f"{row['step_s'] * 1e3:.0f} ± {row['step_s_spread'] * 1e3:.0f}"


if __name__ == "__main__":
    main()
