"""The commands of README.md and docs/, run in the order of their pages, each page in a folder of its own."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.documented import ROOT, RUN, shown
from tests.process.commands import Command


@pytest.mark.parametrize("page", RUN)
def test_commands_of_a_page(page: str, scratch: Path, weft: Command) -> None:
    for each in shown(ROOT / page):
        if each.line in RUN[page]:
            done = weft(*shlex.split(f"{each.line} {RUN[page][each.line]}")[1:], cwd=scratch)
            refused = any(line.startswith("weft: ") for line in each.output)
            assert done.returncode == (2 if refused else 0), f"{each.line}\n{done.stdout}{done.stderr}"
            assert not [line for line in each.output if line not in done.stdout + done.stderr], each.line
