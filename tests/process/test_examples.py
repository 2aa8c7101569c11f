"""Examples run, alone and distributed, and print what the documentation says they print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.commands import WEFT

ROOT = Path(__file__).parents[2]
PRINTS = {
    "plain.py": ("epoch 0: held-out loss 0.", "epoch 0: held-out loss 0."),
    "mixed.py": ("1 workers, 64 steps", "2 workers, 32 steps"),
}


def said(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_listed() -> None:
    assert {file.name for file in (ROOT / "examples").glob("*.py")} == set(PRINTS)


@pytest.mark.parametrize("name", PRINTS)
def test_an_example(name: str, tmp_path: Path) -> None:
    path = str(ROOT / "examples" / name)
    alone, together = PRINTS[name]
    assert said(sys.executable, path, cwd=tmp_path).startswith(alone)
    assert f"[0] {together}" in said(*WEFT, "train", path, "-n", "2", cwd=tmp_path)


@pytest.mark.parametrize("job", ["text", "wide", "vision"])
def test_bundled_jobs_learn_and_report(job: str, tmp_path: Path) -> None:
    args = [*WEFT, "train", job, "-n", "2", "--steps", "30", "--", "--size", "tiny"]
    text = said(*args, cwd=tmp_path)
    assert "held out loss" in text and "30 steps" in text
