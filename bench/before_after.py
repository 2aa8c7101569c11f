"""Two checkouts of Weft under one command, interleaved: does a change make anything slower?

    python bench/before_after.py BEFORE overhead --rounds 11
    python bench/before_after.py BEFORE compare --rounds 3 -- wide "bsp / direct" --peers ddp --steps 25 --seeds 1

BEFORE is a checkout of another commit; this file's own checkout is "after". Every round runs the command once in each
checkout, in reverse order every other round. A row of the result is the median over rounds of the ratio after/before,
for the step itself and, where the command measures a reference as well (the plain loop, `ddp`), for the step over that
reference. The reference's own ratio stands beside it: it is the same code in both checkouts, so its distance from 1 is
the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from overhead import cpu_share, ratio

AFTER = Path(__file__).resolve().parents[1]


def once(checkout: Path, what: str, words: list[str]) -> dict[str, tuple[float, float | None]]:
    """One run of the command in a checkout: of each row the step, and the step over its reference."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        if what == "overhead":
            command = [sys.executable, "bench/overhead.py", "--pairs", "2", *words]
        else:
            command = [sys.executable, "-m", "weft.cli", "compare", *words, "--out", f"{folder}/out"]
        at = command.index("--") if "--" in command else len(command)
        command[at:at] = ["--json", str(found)]
        environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
        subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
        return rows(json.loads(found.read_text()))


def rows(found: dict[str, Any]) -> dict[str, tuple[float, float | None]]:
    if "one_host" in found:
        steps = {row["name"]: row["step_s"] for row in found["rows"]}
        peer = steps.get("ddp")
        return {name: (step, step / peer if peer else None) for name, step in steps.items()}
    measured = {}
    for row in found["rows"]:
        measured[f"{row['what']}, {row['ours']}"] = (row["ours_s"], row["ours_s"] / row["reference_s"])
        measured[f"{row['what']}, {row['reference']}"] = (row["reference_s"], None)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path, help="A checkout of the commit before.")
    parser.add_argument("what", choices=("overhead", "compare"))
    parser.add_argument("--rounds", type=int, default=11)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)  # behind it, arguments of the command
    options, words = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    checkouts = {"before": options.before.resolve(), "after": AFTER}
    seen: dict[str, list[dict[str, tuple[float, float | None]]]] = {name: [] for name in checkouts}
    with cpu_share() as share:
        for number in range(options.rounds):
            for name in checkouts if number % 2 == 0 else reversed(checkouts):
                seen[name].append(once(checkouts[name], options.what, words))
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    for label in seen["after"][0]:
        steps = {name: [each[label][0] for each in seen[name]] for name in checkouts}
        line = f"{label:62} after/before {text(ratio(steps['after'], steps['before']))}"
        line += (
            f"  {statistics.median(steps['after']) * 1e3:.1f} against {statistics.median(steps['before']) * 1e3:.1f} ms"
        )
        relative = {name: [each[label][1] for each in seen[name]] for name in checkouts}
        if all(value is not None for values in relative.values() for value in values):
            line += f"; over the reference {text(ratio(relative['after'], relative['before']))}"  # type: ignore[arg-type]
        print(line)
    print(f"cpu {share['cpu']:.0%}, steal {share['steal']:.1%}, {options.rounds} rounds")


def text(found: dict[str, float]) -> str:
    return f"{found['ratio']:.4f} [{found['low']:.4f}, {found['high']:.4f}] iqr {found['iqr']:.4f}"


if __name__ == "__main__":
    main()
