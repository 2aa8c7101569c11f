"""`weft systems`: the surveyed systems, and which of them run."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from weft import systems as surveyed
from weft.cli import app
from weft.cli._show import JsonOption, console, emit, table
from weft.errors import UserError, nearest


@app.command()
def systems(
    name: Annotated[str | None, typer.Argument(help="One system, by id or alias.")] = None,
    group: Annotated[str | None, typer.Option(help="Only systems of this group.")] = None,
    status: Annotated[str | None, typer.Option(help="Only this status: runs, partly, planned or outside.")] = None,
    json: JsonOption = None,
) -> None:
    """List the surveyed systems. Those with a strategy run with `weft train --system ID`."""
    chosen = list(surveyed.catalogue()) if name is None else [surveyed.find(name)]
    for wanted, key in ((group, "group"), (status, "status")):
        known = {getattr(each, key) for each in surveyed.catalogue()}
        if wanted is not None and wanted not in known:
            raise UserError(f"no system has the {key} '{wanted}'{nearest(wanted, known)}")
        chosen = [each for each in chosen if wanted in (None, getattr(each, key))]
    emit({"rows": [each.row() for each in chosen]}, json)
    out = console(json)
    if name is not None:
        each = chosen[0]
        out.print(
            f"{each.name} ({each.id}; {each.group}; {each.status})\n{each.strategy or 'no strategy'}\n{each.note}"
        )
        return
    rows = [[each.id, each.status, each.strategy or "", each.name] for each in chosen]
    table(out, ["id", "status", "strategy", "name"], rows)
    counts = Counter(each.status for each in chosen)
    out.print(f"\n{len(chosen)} systems: " + ", ".join(f"{n} {word}" for word, n in counts.most_common()))
