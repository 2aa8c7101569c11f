"""Fixtures of all tests: the command line, kept processes, a job's script, and a folder that must be left clean."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process import commands
from tests.process.pool import KEPT, Pool


@pytest.fixture(scope="session")
def weft() -> commands.Command:
    """Run the command line in a process of its own: `weft("train", "job.py", "-n", 2, cwd=folder, WEFT_SEED="3")`."""
    return commands.weft


@pytest.fixture(scope="session", autouse=True)
def pool() -> Iterator[Pool]:
    """The processes that `spawn` keeps from one run to the next."""
    yield KEPT
    KEPT.close()


@pytest.fixture
def job(tmp_path: Path) -> commands.Job:
    """Write the script of a job into the test's folder: `job("import weft\\n...", name="job.py")`; returns its path."""

    def write(text: str, name: str = "job.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with its own temporary directory. At its end, no process works in it and no file of weft is left."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    yield tmp_path
    assert commands.gone(tmp_path)
    assert list((tmp_path / "tmp").glob("weft-*")) == []
