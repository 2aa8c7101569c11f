"""The tutorial: its scripts and commands, run in the order in which they stand there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.documented import ROOT, TUTORIAL, scripts, shown
from tests.process.commands import Command

SHORTER = {"compare": ["bsp / direct", "--links", "auto"]}
"""One strategy in place of the default ones, and links as the system allows."""


def test_everything_on_the_page(scratch: Path, weft: Command) -> None:
    for name, text in scripts().items():
        (scratch / name).write_text(text)
    assert {file.name for file in scratch.glob("*.py")} == {"job.py", "loop.py"}
    said: dict[str, str] = {}
    for each in shown(ROOT / TUTORIAL):
        program, first, *rest = shlex.split(each.line)
        if program == "python":
            done = subprocess.run(
                [sys.executable, first, *rest], cwd=scratch, capture_output=True, text=True, check=False
            )
        else:
            done = weft(first, *rest, *SHORTER.get(first, []), cwd=scratch)
        assert done.returncode == 0, f"{each.line}\n{done.stdout}{done.stderr}"
        said[each.line] = done.stdout
        if "--out runs/loop" in each.line:
            before = (scratch / "epoch-0.pt").stat().st_mtime_ns
    assert "1 workers, 128 steps" in said["python job.py"]
    assert "2 workers, 64 steps" in said["weft train job.py -n 2"]
    resumed = said["weft train --resume runs/loop --steps 168"]
    assert "epoch 2: held-out loss" in resumed and "over 512 samples" in resumed
    assert "epoch 0" not in resumed and (scratch / "epoch-0.pt").stat().st_mtime_ns == before
    [load] = re.findall(r"(?s)```python\n(import weft\n\nweights.*?)```", (ROOT / TUTORIAL).read_text(encoding="utf-8"))
    loaded = subprocess.run([sys.executable, "-c", load], cwd=scratch, capture_output=True, text=True, check=True)
    assert loaded.stdout == "['0.bias', '0.weight', '2.bias', '2.weight']\n"
