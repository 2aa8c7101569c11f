"""`weft answers`: all answers that a strategy can be composed of, including the user's own files."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from weft.axis import AXES, DEFAULTS, Answer, catalogue, field_docs
from weft.cli import app
from weft.cli._command import Command
from weft.cli._explain import QUESTIONS
from weft.cli._show import JsonOption, console, emit, entry
from weft.errors import UserError, nearest


@app.command(cls=Command)
def answers(
    name: Annotated[
        str | None, typer.Argument(help="One of the six questions, or one answer; everything by default.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """List what a strategy can be composed of, with parameters."""
    known = [(axis, each, kind) for axis in AXES for each, kind in catalogue(axis).items()]
    chosen = [_row(*row) for row in known if name in (None, *row[:2])]
    if name is not None and not chosen:
        names = [*AXES, *(each for _, each, _ in known)]
        hint = nearest(name, names, listed_by="weft answers")
        raise UserError(f"'{name}' is neither one of the six questions nor an answer{hint}")
    emit({"rows": chosen}, json)
    out = console(json)
    for axis in dict.fromkeys(row["axis"] for row in chosen):
        out.print(f"{axis}: {QUESTIONS[axis]}\n")
        for row in chosen:
            if row["axis"] == axis:
                entry(out, row["name"] + " *" * row["default"], row["meaning"], indent=2)
                for parameter in row["parameters"]:
                    default = "" if parameter["default"] is None else f" = {parameter['default']}"
                    entry(out, parameter["name"] + default, parameter["meaning"], indent=4)
        out.print()
    out.print("* the default of its question")


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
