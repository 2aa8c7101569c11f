"""`weft systems`: the published systems, and which of them run."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import typer

from weft import systems as published
from weft.cli import app
from weft.cli._command import Command
from weft.cli._show import JsonOption, console, emit, entry
from weft.errors import UserError, nearest
from weft.systems import System

_STATUS_COLUMN, _NAME_COLUMN = 26, 35


@app.command(cls=Command)
def systems(
    name: Annotated[str | None, typer.Argument(help="One system, by id or alias.")] = None,
    group: Annotated[str | None, typer.Option(help="Only systems of this group.")] = None,
    status: Annotated[str | None, typer.Option(help="Only this status: runs, partly, planned or outside.")] = None,
    json: JsonOption = None,
) -> None:
    """List published systems and their strategies.

    Those with a strategy run with `weft train --system ID`.
    """
    if name is not None and (group is not None or status is not None):
        raise UserError("--group and --status choose among all systems; omit them, or omit the name")
    chosen = list(published.catalogue()) if name is None else [published.find(name)]
    for wanted, key in ((group, "group"), (status, "status")):
        known = {getattr(each, key) for each in published.catalogue()}
        if wanted is not None and wanted not in known:
            raise UserError(f"no system has the {key} '{wanted}'{nearest(wanted, known)}")
        chosen = [each for each in chosen if wanted in (None, getattr(each, key))]
    emit({"rows": [each.row() for each in chosen]}, json)
    out = console(json)
    if name is not None:
        [one] = chosen
        note = textwrap.fill(one.note, out.width, break_long_words=False)
        out.print(f"{one.name} ({one.id}; {one.group}; {one.status})\n{one.strategy or 'no strategy'}\n{note}")
        return
    for each in chosen:
        status_and_name = each.status.ljust(_NAME_COLUMN - _STATUS_COLUMN) + each.name
        entry(out, each.id, status_and_name, column=_STATUS_COLUMN, hang=_NAME_COLUMN)
        if each.strategy is not None:
            entry(out, "", each.strategy, column=_NAME_COLUMN)
    out.print("\n" + textwrap.fill(_counted(chosen), out.width))


def _counted(chosen: Sequence[System]) -> str:
    """The number of systems by status, and of those that no survey names."""
    beyond = [each.id for each in chosen if not each.surveys]
    others = f" ({len(chosen) - len(beyond)} of the surveys, and {', '.join(beyond)})" if beyond else ""
    counts = Counter(each.status for each in chosen)
    return f"{len(chosen)} systems{others}: " + ", ".join(f"{n} {word}" for word, n in counts.most_common())
