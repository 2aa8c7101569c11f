"""`weft check`: a strategy in words, or why it is not valid."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli import app
from weft.cli._show import JsonOption, console, emit, table
from weft.strategy import Strategy

QUESTIONS = {
    "partition": "where the model lives",
    "optimization": "whose optimizer steps",
    "synchrony": "when a worker may start its next step",
    "topology": "who talks to whom",
    "compression": "what goes on the wire",
    "schedule": "in which order it leaves",
}


@app.command()
def check(
    strategy: Annotated[str, typer.Argument(help='A strategy, as in "bsp / ring / wfbp", or @file.toml.')],
    json: JsonOption = None,
) -> None:
    """Explain a strategy in words, or why it is not valid and what to use instead."""
    value = Strategy.parse(strategy).check()
    rows = [
        {"question": QUESTIONS[axis], "axis": axis, "answer": str(answer), "meaning": answer.summary}
        for axis, answer in value.answers()
    ]
    emit({"strategy": str(value), "exact": exact(value), "kind": kind(value), "rows": rows}, json)
    out = console(json)
    out.print(f"{value}\n")
    table(out, ["question", "answer", "meaning"], [[r["question"], r["answer"], r["meaning"]] for r in rows])
    out.print(f"\n{kind(value)}")


def exact(strategy: Strategy) -> bool:
    """Whether results have the same bits for any layout of the run."""
    return strategy.topology.exact and strategy.synchrony.lockstep


def kind(strategy: Strategy) -> str:
    """How reproducible the results are, in one or two sentences."""
    if not strategy.synchrony.lockstep:
        return "Workers do not wait for each other: results depend on the order of arrival, and no run repeats another."
    if exact(strategy):
        return "Results are bit-identical for any number of processes, any buckets and any schedule."
    return (
        "Replicas are identical and a run repeats exactly on the same layout; another number of processes or other "
        "buckets change the last bits. `direct` does not have this limit."
    )
