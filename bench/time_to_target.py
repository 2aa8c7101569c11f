"""Time to a training loss on `text` (2 M), real computing: waiting and not waiting, with and without stragglers.

    python bench/time_to_target.py --links loopback --steps 160        on a machine with many cores
    python bench/time_to_target.py                                     on emulated links

Losses of all workers are taken as time goes, and averaged over the last five of each. Every worker takes so many steps;
where nobody waits, fast ones are done earlier, and what is shown is the time from the beginning.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import weft
from weft.lab.figures import time_to_target_apart_s

WAYS = {
    "ring, bsp": "bsp / ring",
    "bsp": "bsp / parameter_server(servers=0)",
    "backup(spares=1)": "backup(spares=1) / parameter_server(servers=0)",
    "ssp(slack=4)": "ssp(slack=4) / parameter_server(servers=0)",
    "essp(slack=4)": "essp(slack=4) / parameter_server(servers=0)",
    "softsync(n=2)": "softsync(n=2) / parameter_server(servers=0)",
    "asp": "asp / parameter_server(servers=0)",
    "staleness_weighted(asp)": "staleness_weighted(asp) / parameter_server(servers=0)",
    "delay_compensated(asp)": "delay_compensated(asp) / parameter_server(servers=0)",
    "downpour(push=4, fetch=4)": "downpour(push=4, fetch=4) / asp / parameter_server(servers=0)",
}
SLOW = {"nobody": (), "worker 3, 4x": ("3=4x",), "all, 4x in 10 %": ("all=4x@10%",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--links", default="emulated")
    parser.add_argument("--targets", type=float, nargs="+", default=[3.0, 2.7, 2.5])
    parser.add_argument("--slow", nargs="+", choices=tuple(SLOW), default=list(SLOW))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("runs/time-to-target"))
    args = parser.parse_args()
    print(
        "| slow | way | step, ms | "
        + " | ".join(f"to {t:g}, s" for t in args.targets)
        + " | loss after 5 s, 10 s, 20 s |"
    )
    print("|---|---|---|" + "---|" * (len(args.targets) + 1))
    for name in args.slow:
        out = args.out / str(list(SLOW).index(name))
        result = weft.compare(
            "text",
            {way: WAYS[way] for way in args.ways},
            args=("--size", "2m"),
            steps=args.steps,
            seeds=1,
            network=args.links,
            slow=SLOW[name],
            out=out,
        )
        for number, row in enumerate(result.rows):
            if row["error"]:
                print(f"| {name} | {row['name']} | {row['error']} |")
                continue
            folder = out / f"{number + 1:02d}-seed0"
            times = [time_to_target_apart_s(folder, 4, target) for target in args.targets]
            cells = [f"{seconds:.1f}" if seconds is not None else "not" for seconds in times]
            step = f"{row['step_s'] * 1e3:.0f} ± {row['step_s_spread'] * 1e3:.0f}"
            print(f"| {name} | {row['name']} | {step} | " + " | ".join(cells) + f" | {after(folder)} |", flush=True)


def after(folder: Path) -> str:
    """Losses around some moments."""
    lines = [json.loads(line) for file in folder.glob("events-*.jsonl") for line in file.read_text().splitlines()]
    began = min(event["time_s"] for event in lines)
    found = []
    for moment in (5, 10, 20):
        near = [event["loss"] for event in lines if abs(event["time_s"] - began - moment) < 0.1 * moment]
        found.append(f"{statistics.mean(near):.2f}" if near else "–")
    return ", ".join(found)


if __name__ == "__main__":
    main()
