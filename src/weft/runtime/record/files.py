"""Small files of a run folder: replaced whole, appended line by line, and held by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import os
from pathlib import Path
from typing import IO, Any

from weft.errors import JobError, UserError
from weft.store.checkpoint import settle, sync

log = logging.getLogger(__name__)


class writing:
    """Turns an OSError into one sentence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free space, or give another with --out" if full else "give another with --out"
            raise JobError(f"the run folder {self.path} cannot be written: {error.strerror}; {remedy}") from error


def hold(folder: Path, what: str) -> IO[bytes]:
    """Lock a folder for this process, until the returned file is closed. Raises UserError if another process has it.

    It is a POSIX lock, which a forked process does not inherit: data-loader processes of a killed run do not keep it.
    """
    file = (folder / f".{what}.lock").open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise UserError(f"{folder} is in use by a running run; wait for its end, or stop it first") from None
    except OSError as error:
        log.warning("%s cannot be locked: %s; do not start a second run there", folder, error.strerror)
    return file


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically; if that fails, the old content stays."""
    with writing(path.parent):
        settle(path, text)
        sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a small, human-readable JSON file."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def open_lines(path: Path) -> IO[str]:
    """Open a file of lines for appending; a truncated last line is terminated first."""
    file = path.open("a+b")
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8")


def append_line(path: Path, value: Any) -> None:
    with writing(path.parent), open_lines(path) as file:
        file.write(json.dumps(value) + "\n")


def lines_in(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0
