"""Output for people and for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weft.errors import JobError

_FILE_WIDTH = 150

JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON to a file, or to stdout with -.")
]


def console(target: str | None) -> Console:
    """The console for human-readable output: stdout, or stderr if stdout carries JSON."""
    shown = Console(stderr=target == "-", highlight=False, soft_wrap=True)
    if not shown.is_terminal and "COLUMNS" not in os.environ:
        shown.width = _FILE_WIDTH  # a file or log need not be wrapped
    return shown


def emit(result: dict[str, Any], target: str | None) -> None:
    """Write a result as JSON if the option is given."""
    if target is None:
        return
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise JobError(f"--json {target} cannot be written: {error.strerror}; give another file, or -") from None


def table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a plain table."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(escape(str(cell)) for cell in row))
    console.print(shown)
