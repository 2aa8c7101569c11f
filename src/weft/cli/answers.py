"""`weft answers`: all answers that a strategy can be composed of, including the user's own files."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from weft.axis import AXES, DEFAULTS, Answer, catalogue, field_docs
from weft.cli import app
from weft.cli._show import JsonOption, console, emit, table
from weft.errors import UserError, nearest


@app.command()
def answers(
    axis: Annotated[str | None, typer.Argument(help="One of the six questions; all of them by default.")] = None,
    json: JsonOption = None,
) -> None:
    """List the answers to the six questions and their parameters."""
    if axis is not None and axis not in AXES:
        raise UserError(f"'{axis}' is not one of the six questions{nearest(axis, AXES)}")
    rows = [_row(each, name, kind) for each in AXES if axis in (None, each) for name, kind in catalogue(each).items()]
    emit({"rows": rows}, json)
    out = console(json)
    shown = [[r["axis"], r["name"] + (" *" if r["default"] else ""), r["meaning"]] for r in rows]
    table(out, ["question", "answer", "meaning"], shown)
    for row in rows:
        for parameter in row["parameters"]:
            default = "" if parameter["default"] is None else f" = {parameter['default']}"
            out.print(f"  {row['name']}({parameter['name']}{default}): {parameter['meaning']}")
    out.print("\n* the default of its question")


def _row(axis: str, name: str, kind: type[Answer]) -> dict[str, Any]:
    docs = field_docs(kind)
    parameters = [
        {
            "name": field.name,
            "default": None if field.default is dataclasses.MISSING else str(field.default),
            "meaning": docs.get(field.name, ""),
        }
        for field in dataclasses.fields(kind)
    ]
    meaning = (kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return {"axis": axis, "name": name, "default": DEFAULTS[axis] == name, "meaning": meaning, "parameters": parameters}
