"""A worker on a GPU among parameter servers: what its step costs beside computing alone, and how much of it is hidden.

    PYTHONPATH=src python3 bench/pinned.py

`text` at 10m with a large batch, bf16 autocast, one worker and four servers over loopback, so that every byte passes
through pinned memory and a socket. Rounds alternate; the bound is what the wire alone takes for the model out and back
at the rate that `bench/messaging.py` shows, or computing, whichever is longer.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from weft.runtime.record.run_folder import events

WAYS = {
    "alone": "bsp / direct",
    "sequential": "bsp / parameter_server(servers=4) / sequential",
    "wfbp": "bsp / parameter_server(servers=4) / wfbp",
    "priority": "bsp / parameter_server(servers=4) / priority",
    "asp, priority": "asp / parameter_server(servers=4) / priority",
}
WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="10m")
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(args.rounds):
        for name, strategy in WAYS.items():
            found[name] += steps(strategy, args.size, args.batch, args.steps)
    print("| schedule | step, ms | quartiles | over alone, ms |\n|---|---|---|---|")
    alone = statistics.median(found["alone"])
    for name, seconds in found.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        print(f"| {name} | {middle * 1e3:.0f} | {low * 1e3:.0f} to {high * 1e3:.0f} | {(middle - alone) * 1e3:.0f} |")


def steps(strategy: str, size: str, batch: int, count: int) -> list[float]:
    """The seconds of a run's steps after warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        line = [sys.executable, "-m", "weft.cli", "train", "text", "-n", "1", "--device", "cuda", "--out", str(out)]
        line += ["--strategy", strategy, "--steps", str(count), "--save-every", "0"]
        job = ["--size", size, "--batch", str(batch), "--dtype", "bfloat16"]
        subprocess.run([*line, "--", *job], check=True, stdout=subprocess.DEVNULL)
        return [event["step_s"] for event in events(out)][WARM_UP:]


if __name__ == "__main__":
    main()
