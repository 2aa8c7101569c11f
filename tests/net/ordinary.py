"""A command as an ordinary user, who may not look into root's folders: `python ordinary.py COMMAND…`, run as root.

What the command needs (the interpreter, this repository) is shown to it at its own path, in mounts of its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from weft.lab import namespaces

USER = 64017
"""Belongs to nobody: no name, no group, no home."""


def show(paths: list[Path]) -> None:
    """Put an empty folder over every one that others may not enter, and what is needed back inside."""
    handles = {path: os.open(path, os.O_PATH) for path in paths}
    for path in paths:
        for folder in reversed(path.parents):
            if not folder.stat().st_mode & 1:
                namespaces.mount("tmpfs", str(folder), "tmpfs", 0, "mode=755")
                break
    for path, handle in handles.items():
        if not path.exists():
            path.mkdir(parents=True)
            namespaces.bind(f"/proc/self/fd/{handle}", str(path))


def main() -> None:
    namespaces.unshare(namespaces.NEWNS)
    namespaces.mount("", "/", "", 0x44000)  # nothing that follows shows outside
    show([Path(sys.base_prefix).resolve(), Path(__file__).resolve().parents[2]])
    home = Path("/mnt")  # there on every Linux, and covered for nobody else
    namespaces.mount("tmpfs", str(home), "tmpfs", 0, "mode=1777")
    os.environ |= {"HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
