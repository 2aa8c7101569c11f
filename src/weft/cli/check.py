"""`weft check`: a strategy in words, or why it is not valid."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer
from rich.console import Console

from weft.cli import app
from weft.cli._command import Command
from weft.cli._explain import EXAMPLE, QUESTIONS, WORKERS, copies, exact, held, kind, meanings, rounds, wire_bytes
from weft.cli._show import JsonOption, console, emit, entry, table
from weft.cli._strategy import parse_strategy
from weft.strategy import Strategy
from weft.units import bytes_text

_ANSWER_COLUMN = 39


@app.command(cls=Command)
def check(
    strategy: Annotated[str, typer.Argument(help='A strategy, as in "bsp / ring / wfbp", or @file.toml.')],
    json: JsonOption = None,
) -> None:
    """Explain a strategy, or why it is not valid, with an alternative."""
    value = parse_strategy(strategy).check()
    words = meanings(value)
    rows = [
        {"question": QUESTIONS[axis], "axis": axis, "answer": str(answer), "meaning": words[axis]}
        for axis, answer in value.answers()
    ]
    costs = {
        "rounds": {str(workers): rounds(value, workers) for workers in WORKERS},
        "wire_bytes": {str(workers): wire_bytes(value, workers) for workers in WORKERS},
    }
    about = {"strategy": str(value), "exact": exact(value), "kind": kind(value), "copies": copies(value)}
    emit({**about, **costs, "rows": rows}, json)
    out = console(json)
    out.print(f"{value}\n")
    for row in rows:
        entry(out, row["question"], row["answer"], column=_ANSWER_COLUMN)
        entry(out, "", row["meaning"], column=_ANSWER_COLUMN + 2)
    out.print(f"\n{textwrap.fill(kind(value), out.width)}\n\n{textwrap.fill(held(value), out.width)}\n")
    _print_costs(out, value)


def _print_costs(out: Console, value: Strategy) -> None:
    """Rounds and bytes of an exchange for some numbers of workers."""
    if value.shares_memory:
        out.print("Nothing is sent.")
        return
    out.print(textwrap.fill(f"An exchange in one bucket, for a model of {EXAMPLE}:", out.width) + "\n")
    rows = [[n, rounds(value, n), bytes_text(wire_bytes(value, n))] for n in WORKERS]
    table(out, ["workers", "rounds", "a worker sends per step"], rows)
