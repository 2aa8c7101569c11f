"""Bundled jobs: real training scripts that need no download, each written as a user would write theirs.

`text` is a GPT on Python's own source (much computing), `wide` an MLP (little computing, much to send),
`vision` a small ResNet with BatchNorm. Every public file of this folder is a job: a script with a `main()`,
and the functions `build(size)` and `data(size, seed)` for use without running it.
"""

from __future__ import annotations

from pathlib import Path


def names() -> tuple[str, ...]:
    """The bundled jobs, in alphabetical order."""
    files = Path(__file__).parent.glob("*.py")
    return tuple(sorted(file.stem for file in files if not file.stem.startswith("_")))


def path(name: str) -> Path | None:
    """The script of the bundled job `name`, or None when there is no such job."""
    return Path(__file__).with_name(f"{name}.py") if name in names() else None
