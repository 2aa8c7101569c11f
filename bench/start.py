"""How long a command takes from its start to its end, and where the time of a short run goes.

    python bench/start.py [--rounds 7]

Commands alternate, round by round, each in a new process with warm file caches. The stages of the run are read from its
folder: a file's time of writing tells when the run had come so far.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from overhead import cpu_share

WEFT = [sys.executable, "-m", "weft.cli"]
TRAIN = ["train", "text", "-n", "4", "--steps", "1", "--out", "run", "--", "--size", "2m"]
COMMANDS = ((["--version"], 0.3), (["check", "bsp / ring"], 0.5), (TRAIN, 5.0))
"""Each command with its bound in seconds."""
STAGES = (
    (".launch.lock", "the launcher's imports and checks, beside the template's imports"),
    ("environment.json", "the rest of the template's imports, the forks, the job until weft.init()"),
    ("model.json", "the job until run.distribute()"),
    ("checkpoints/step-00000001/manifest.json", "the processes connected, one step, its checkpoint"),
    ("report.json", "the job's evaluation of held-out data, in every process"),
)
"""Files of the run folder in the order of writing, and what happens before each."""
CLOSING = "closing, to the launcher's end"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    spent: dict[str, list[float]] = {}
    with cpu_share() as share:
        for number in range(rounds + 1):
            for words, _ in COMMANDS:
                for name, seconds in timed(words).items():
                    spent.setdefault(name, []).extend([seconds] if number else [])  # the first round warms caches
    print(f"{rounds} rounds; CPU {share['cpu']:.0%}, steal {share['steal']:.1%}\n")
    print("| command | median | range | bound |\n|---|---|---|---|")
    for words, bound_s in COMMANDS:
        print(row(f"`{spelled(words)}`", spent[spelled(words)], f" {bound_s:g} s |"))
    print("\n| stage of the run | median | range |\n|---|---|---|")
    for name in (*(what for _, what in STAGES), CLOSING):
        print(row(name, spent[name]))


def timed(words: list[str]) -> dict[str, float]:
    """The seconds of one command and, of a run, those of its stages."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        subprocess.run([*WEFT, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ended = time.time()
        return {spelled(words): ended - began} | (stages(Path(folder) / "run", began, ended) if words is TRAIN else {})


def stages(run: Path, began: float, ended: float) -> dict[str, float]:
    """The seconds between the writing of one file of a run folder and that of the next."""
    times = [began, *((run / name).stat().st_mtime for name, _ in STAGES), ended]
    names = [*(what for _, what in STAGES), CLOSING]
    return {name: after - before for name, before, after in zip(names, times[:-1], times[1:], strict=True)}


def spelled(words: list[str]) -> str:
    """A command as it is typed."""
    return "weft " + " ".join(
        json.dumps(word) if " " in word else word for word in words if word not in ("--out", "run")
    )


def row(name: str, seconds: list[float], rest: str = "") -> str:
    return f"| {name} | **{statistics.median(seconds):.2f} s** | {min(seconds):.2f} to {max(seconds):.2f} |{rest}"


if __name__ == "__main__":
    main()
