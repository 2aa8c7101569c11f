"""Spans of time and the trace that ui.perfetto.dev opens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time in intervals that do not overlap."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def without(span: Span, others: list[Span]) -> list[Span]:
    """The parts of an interval that are outside of these intervals, which are sorted and do not overlap."""
    parts, at = [], span[0]
    for start, end in others:
        parts.append((at, min(start, span[1])))
        at = max(at, end)
    return [(start, end) for start, end in [*parts, (at, span[1])] if start < end]


def overlap(one: list[Span], other: list[Span]) -> float:
    """The duration of the intersection of two sets of intervals."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


def length(spans: Iterable[Span]) -> float:
    return float(sum(end - start for start, end in spans))


def perfetto(steps: list[tuple[int, dict[str, Any]]], process: int) -> dict[str, Any]:
    """The traced steps in the format of ui.perfetto.dev and chrome://tracing."""
    rows = {"forward": 0, "backward": 0, "waited": 0, "optimizer": 0, "update": 0, "encode": 1, "decode": 1}
    events: list[dict[str, Any]] = []

    def add(name: str, row: int, start: float, end: float, step: int) -> None:
        events.append(
            {"name": name, "ph": "X", "pid": process, "tid": row, "ts": start * 1e6, "dur": (end - start) * 1e6}
            | {"args": {"step": step}}
        )

    for step, at in steps:
        for name, row in rows.items():
            for start, end in at[name]:
                add("wait" if name == "waited" else name, row, start, end, step)
        for bucket, start, end in at["wire"]:
            add(f"bucket {bucket}", 2 + bucket, start, end, step)
    names = {0: "loop", 1: "engine"} | {2 + b: f"wire: bucket {b}" for _, at in steps for b, *_ in at["wire"]}
    for row, name in names.items():
        events.append({"name": "thread_name", "ph": "M", "pid": process, "tid": row, "args": {"name": name}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
