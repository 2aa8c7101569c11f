"""The page `answers.md`, from the catalogue: each answer's contract, parameters, traffic, paper and conflicts."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.axis import AXES, DEFAULTS, Answer, catalogue, field_docs, find, make, parse_raw
from weft.compression import Compressor
from weft.errors import Conflict
from weft.ops import All, Place, Round, Scatter, Spec, Sum
from weft.optimization import LocalSteps
from weft.schedule import Schedule
from weft.strategy import Strategy, conflicts
from weft.synchrony import Synchrony
from weft.topology import CollectiveTopology, ServerTopology, Topology
from weft.units import bytes_text

HEAD = """\
# Answers

*Generated from the catalogue by `make docs`.* A strategy gives one answer to each of six questions, and omitted
questions keep their default: `bsp / ring / error_feedback(topk(ratio=0.01))`. `weft check STRATEGY` explains one.

**Example for rounds and bytes:** one linear layer of 5000 × 5000 float32 values, 25 million, which are S = {size} of
gradients, and n = {workers} workers. *Rounds* are messages that follow each other in one exchange; *bytes* are those
that the busiest worker sends in a step, without headers. In formulas *a* is a message's latency, *b* the bandwidth.
"""
QUESTIONS = {
    "partition": "Where does the model live?",
    "optimization": "Whose optimizer steps, and what is merged?",
    "synchrony": "When may a worker start its next step?",
    "topology": "Who talks to whom?",
    "compression": "What goes on the wire?",
    "schedule": "In which order does it leave?",
}
EXAMPLE = [Spec("weight", (5000, 5000))]
WORKERS = (2, 4, 16)
PAPERS: dict[str, str] = tomllib.loads(Path(__file__).with_name("papers.toml").read_text(encoding="utf-8"))
SETTINGS = [
    Strategy.parse(f"{optimization} / {synchrony} / {topology}")
    for optimization in ("gradient", "downpour")
    for synchrony, topology in itertools.product(
        ("bsp", "asp"), ("direct", "parameter_server", "hierarchical", "shared_memory")
    )
]
"""Surroundings in which a pair of answers is tried."""


def answers() -> str:
    """The text of the page."""
    names = ", ".join(map(str, WORKERS[:-1]))
    head = HEAD.format(size=bytes_text(sum(spec.nbytes for spec in EXAMPLE)), workers=f"{names} or {WORKERS[-1]}")
    parts = [head]
    for axis in AXES:
        own = {name: kind for name, kind in catalogue(axis).items() if kind.__module__.startswith("weft.")}
        parts += [f"## {QUESTIONS[axis]}", f"`{axis}`; the default is `{DEFAULTS[axis]}`.", _overview(own)]
        for name, kind in own.items():
            parts += [f"### `{name}`", *_answer(kind)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _overview(kinds: dict[str, type[Answer]]) -> str:
    rows = ["| answer | summary |", "|---|---|"]
    for name, kind in kinds.items():
        summary = re.sub(r" \[[^]]*\]", "", _sample(kind).summary)
        rows.append(f"| [`{name}`](#{name}) | {summary} |")
    return "\n".join(rows)


def _answer(kind: type[Answer]) -> Iterator[str]:
    yield _with_code(inspect.getdoc(kind) or "")
    docs = field_docs(kind)
    fields = dataclasses.fields(kind)
    if fields:
        rows = ["| parameter | default | meaning |", "|---|---|---|"]
        for field in fields:
            default = "required" if field.default is dataclasses.MISSING else f"`{_spelled(field.default)}`"
            meaning = " ".join(docs.get(field.name, "").split()).replace("|", "\\|")
            rows.append(f"| `{field.name}` | {default} | {meaning} |")
        yield "\n".join(rows)
    answer = _sample(kind)
    yield from _traffic(answer)
    yield from _excluded(answer)
    cited = re.findall(r"\[(?:[\w-]+: )?([^]]*)\]", inspect.getdoc(kind) or "")
    papers = [part.strip() for each in cited for part in re.split(r"[;,] (?=[A-Z])", each)]
    papers = [paper for paper in papers if re.search(r"\d{4}$", paper) or paper in PAPERS]
    if papers:
        yield "Source: " + " ".join(f"{paper}, *{PAPERS[paper].rstrip('.')}*." for paper in papers)


def _with_code(text: str) -> str:
    """A docstring as Markdown: asterisks and underscores of formulas are text."""
    return re.sub(r"(?<![`\\])[*_|](?![^`\n]*`)", lambda mark: "\\" + mark[0], text)


def _sample(kind: type[Answer]) -> Answer:
    """The answer with its defaults; a wrapper gets a usual inner answer."""
    inner = {"compression": "topk", "synchrony": "asp"}
    required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    return make(kind, dict.fromkeys(required, parse_raw(inner[kind.axis])) if required else {})


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- rounds and bytes -------------------------------------------------------------------------------------------------


def _traffic(answer: Answer) -> Iterator[str]:
    """The declared rounds and bytes for the example."""
    if isinstance(answer, Topology):
        rows = [_topology_row(answer, workers) for workers in WORKERS]
        if any(rows):
            yield _table(("workers", "rounds", "bytes of a worker"), rows)
        else:
            yield "Rounds and bytes: none."
    elif isinstance(answer, Compressor):
        strategy = Strategy.of(answer)
        collectives = [(workers, answer.rounds(EXAMPLE, workers)) for workers in WORKERS]
        rows = [
            (str(workers), ", then ".join(map(_round, rounds)), bytes_text(strategy.wire_bytes(EXAMPLE, workers)))
            for workers, rounds in collectives
        ]
        inner = "" if str(answer) == answer.name else f" of `{answer}`"
        yield _table(("workers", f"payload{inner}", "bytes of a worker under `direct`"), rows)
    elif isinstance(answer, LocalSteps):
        yield "Rounds and bytes: `1 / push` pushes of the gradients and `1 / fetch` fetches of the model in a step."
    elif isinstance(answer, Synchrony):
        yield "Rounds and bytes: those of the topology; a synchrony adds none."
    elif isinstance(answer, Schedule):
        yield "Rounds and bytes: those of compressor and topology; a schedule decides when they are sent."


def _topology_row(topology: Topology, workers: int) -> tuple[str, ...]:
    place = Place(workers=workers, latency_s=1.0)
    size = sum(spec.nbytes for spec in EXAMPLE)
    if isinstance(topology, CollectiveTopology):
        rounds, sent = topology.seconds(Sum, size, place), topology.wire_bytes(Sum, size, workers)
    elif isinstance(topology, ServerTopology):
        rounds, sent = topology.seconds(size, place), topology.wire_bytes(size, workers)
    else:
        return ()
    return str(workers), f"{rounds:g}", bytes_text(sent)


def _round(each: Round) -> str:
    verb = {Sum: "summed", All: "gathered", Scatter: "to the owners"}[each.op]
    return f"{bytes_text(each.nbytes)} {verb}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


# --- conflicts --------------------------------------------------------------------------------------------------------


def _excluded(answer: Answer) -> Iterator[str]:
    """The answers to other questions that no strategy combines with this one, grouped by the reason."""
    reasons: dict[str, tuple[str, list[str]]] = {}
    for axis in AXES:
        for name, kind in catalogue(axis).items():
            if kind.__module__.startswith("weft.") and axis != answer.axis:
                conflict = _conflict(answer, _sample(kind))
                if conflict is not None:
                    key = re.sub(rf"\b{name}\b", "…", conflict.why)
                    reasons.setdefault(key, (conflict.why, []))[1].append(name)
    if isinstance(answer, Compressor):
        for outer in ("error_feedback", "only", "mixed"):
            conflict = next(conflicts(Strategy.of(make(find(outer), _wrapping(outer, answer)))), None)
            if conflict is not None:
                reasons.setdefault(conflict.why, (conflict.why, []))[1].append(f"{outer}({answer.name})")
    for why, names in reasons.values():
        example = "for example, " if len(names) > 1 else ""
        yield f"Not with {', '.join(f'`{name}`' for name in names)}: {example}{why}."


def _wrapping(outer: str, inner: Answer) -> dict[str, Any]:
    return {"matrices" if outer == "mixed" else "inner": inner}


def _conflict(one: Answer, other: Answer) -> Conflict | None:
    """None where some strategy combines both; else the conflict that prevents it, if possible between the two."""
    found: list[Conflict] = []
    for setting in SETTINGS:
        reasons = list(conflicts(dataclasses.replace(setting, **{one.axis: one, other.axis: other})))
        if not reasons:
            return None
        found += reasons
    pair, later = {str(one), str(other)}, str(max(one, other, key=lambda answer: AXES.index(answer.axis)))
    between = [each for each in found if {each.one, each.other} == pair]
    return next(iter([*between, *(each for each in found if later in (each.one, each.other)), *found]))
