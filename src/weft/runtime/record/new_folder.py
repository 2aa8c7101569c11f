"""The folder of a new run or comparison: chosen, made, and removed again if it stays without a result."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from weft.errors import UserError
from weft.runtime.record.files import writing

_RUNS = Path("runs")
_NAME_CHARACTERS = 40


def folder_name(job: str, began: time.struct_time, strategy: str = "") -> str:
    """A readable name: the job, the strategy in words, and the local date and time."""
    words = [_in_words(text) for text in (job, strategy) if text]
    return "_".join([*words, time.strftime("%Y-%m-%d_%H%M", began)])


def _in_words(text: str) -> str:
    """Letters, digits, dots and underscores of a text, with hyphens in place of the rest; long ones end at a word."""
    whole = re.sub(r"[^\w.]+", "-", text).strip("-.")
    if len(whole) <= _NAME_CHARACTERS:
        return whole
    return whole[: _NAME_CHARACTERS + 1].rpartition("-")[0] or whole[:_NAME_CHARACTERS]


def new_folder(out: Path | None, name: str) -> tuple[Path, bool]:
    """The folder given with --out, if it is empty, or a new one in runs/; and whether this call has made it."""
    if out is None:
        return next(folder for folder in folders_named(name) if _made(folder)), True
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists and is not an empty folder; give a new one, results are not overwritten")
    return out, _made(out)


def folders_named(name: str) -> Iterator[Path]:
    """Folders in runs/ for runs of one name, in the order in which they are used."""
    return (_RUNS / (name if number == 1 else f"{name}-{number}") for number in range(1, 100_000))


def remove_folder(folder: Path) -> None:
    """Remove a folder, and runs/ with the last one."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.absolute().parent == _RUNS.absolute():
        with suppress(OSError):  # other runs are in it
            folder.parent.rmdir()


def _made(folder: Path) -> bool:
    """Make a folder. Returns whether this call made it, so that two runs never share one."""
    with writing(folder):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            return False
    return True
