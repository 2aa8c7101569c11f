"""Output for people and for programs."""

from __future__ import annotations

import errno
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weft.errors import JobError

_FILE_WIDTH = 150


def _writable(target: str | None) -> str | None:
    """Refuse a file that cannot be written, before the command starts. No file is left."""
    if target is None or target == "-":
        return target
    path = Path(target)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.is_file():
            path.open("a").close()
        elif not path.exists():
            path.touch()
            path.unlink()
    except OSError as error:
        raise _not_written(target, error) from None
    return target


def _not_written(target: str, error: OSError) -> JobError:
    return JobError(f"--json {target} cannot be written: {error.strerror}; give another file, or -")


JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the result as JSON to a file, or to stdout with -.",
        callback=_writable,
        rich_help_panel="Output",
    ),
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
        raise _not_written(target, error) from None


def entry(
    console: Console, name: str, text: str, *, indent: int = 0, column: int = 28, hang: int | None = None
) -> None:
    """Print a name and, beside it from `column` on, a text; its further lines start at `hang`. No word is broken."""
    head = (" " * indent + name).ljust(column)
    lines = textwrap.wrap(
        text,
        max(20, console.width),
        initial_indent=head if len(head) == column else " " * column,
        subsequent_indent=" " * (hang or column),
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
    if len(head) > column or not lines:
        lines.insert(0, head.rstrip())
    for line in lines:
        console.print(line, markup=False)


def table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a plain table."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(escape(str(cell)) for cell in row))
    console.print(shown)
