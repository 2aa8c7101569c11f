"""When compression pays: speed-up over DistributedDataParallel by bandwidth and number of hosts, measured in the lab.

python bench/pays.py FOLDER                     every comparison that is not there yet, then table and picture
python bench/pays.py FOLDER --table             of what is there
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

RATES = [(4, "300mbit"), (4, "1gbit"), (4, "3gbit"), (4, "5gbit")]
HOSTS = [(2, "1gbit"), (8, "1gbit")]
WAYS = ["bsp / direct / int8", "bsp / direct / qsgd(levels=3, norm=max)", "bsp / direct / error_feedback(powersgd)"]


def compare(hosts: int, rate: str, out: Path) -> None:
    command = [sys.executable, "-m", "weft.cli", "compare", "wide", *WAYS, "--peers", "ddp", "--hosts", str(hosts)]
    command += ["--bandwidth", rate, "--steps", "25", "--seeds", "1", "--out", str(out)]
    subprocess.run(command, check=True)


def steps(out: Path) -> dict[str, tuple[float, float]]:
    """Milliseconds of a step, and their spread."""
    rows = json.loads((out / "compare.json").read_text(encoding="utf-8"))["rows"]
    return {row["name"]: (1e3 * row["step_s"], 1e3 * row["step_s_spread"]) for row in rows if row["step_s"]}


def short(way: str) -> str:
    return way.removeprefix("bsp / direct / ")


def table(found: dict[tuple[int, str], dict[str, tuple[float, float]]]) -> None:
    print("| hosts | link | ddp, ms | " + " | ".join(f"`{short(way)}`, ms | speed-up" for way in WAYS) + " |")
    print("|---|---|---|" + "---|---|" * len(WAYS))
    for (hosts, rate), rows in sorted(found.items(), key=lambda item: (item[0][0], *bits(item[0][1]))):
        dense, spread = rows["ddp"]
        cells = [f"{rows[way][0]:.0f} ± {rows[way][1]:.0f} | {dense / rows[way][0]:.2f}" for way in WAYS]
        print(f"| {hosts} | {rate} | {dense:.0f} ± {spread:.0f} | " + " | ".join(cells) + " |")


def bits(rate: str) -> tuple[float]:
    return (float(rate[:-4]) * {"m": 1e6, "g": 1e9}[rate[-4]],)


def picture(found: dict[tuple[int, str], dict[str, tuple[float, float]]], to: Path) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for way in WAYS:
        rates = sorted((bits(rate)[0], rows["ddp"][0] / rows[way][0]) for (n, rate), rows in found.items() if n == 4)
        hosts = sorted((n, rows["ddp"][0] / rows[way][0]) for (n, rate), rows in found.items() if rate == "1gbit")
        left.plot(*zip(*rates, strict=True), marker="o", label=short(way))
        right.plot(*zip(*hosts, strict=True), marker="o", label=short(way))
    for axes, label in ((left, "bandwidth of each of 4 links, bit/s"), (right, "hosts at 1 Gbit/s")):
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set(xlabel=label, ylabel="steps, against ddp", yscale="log")
        axes.set_yticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
    left.set_xscale("log")
    rates = sorted({rate for n, rate in found if n == 4}, key=bits)
    left.set_xticks([bits(rate)[0] for rate in rates], rates)
    left.minorticks_off()
    right.set_xticks(sorted({n for n, rate in found if rate == "1gbit"}))
    left.legend(frameon=False, fontsize=8)
    figure.savefig(to, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    places = {place: args.folder / f"{place[0]}-{place[1]}" for place in RATES + HOSTS}
    for place, out in places.items():
        if not args.table and not (out / "compare.json").exists():
            compare(*place, out)
    found = {place: steps(out) for place, out in places.items() if (out / "compare.json").exists()}
    table(found)
    if args.picture:
        picture(found, args.picture)


if __name__ == "__main__":
    sys.exit(main())
