"""The timeline of a comparison shows one step, whatever of its neighbours falls into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.lab import figures
from weft.runtime.record.trace import perfetto, without

PHASES = ("forward", "backward", "waited", "optimizer", "update", "encode", "decode")


def traced(folder: Path, steps: list[tuple[int, dict[str, Any]]]) -> None:
    whole = [(step, {name: at.get(name, []) for name in (*PHASES, "wire")}) for step, at in steps]
    (folder / "trace-0.json").write_text(json.dumps(perfetto(whole, 0)))


def deferred(step: int) -> tuple[int, dict[str, Any]]:
    """A step of a second whose gradients arrive while the next one's forward waits for them."""
    at = float(step)
    phases = {
        "forward": [(at + 0.1, at + 0.6)],
        "backward": [(at + 0.6, at + 0.9)],
        "optimizer": [(at + 0.95, at + 1.0)],
        "waited": [(at + 1.2, at + 1.4)],
        "update": [(at + 1.4, at + 1.45)],
        "wire": [(0, at + 0.8, at + 1.4), (1, at + 0.7, at + 0.85)],
    }
    return step, phases


def test_a_deferred_step_shows_its_own_span_and_its_waiting(tmp_path: Path) -> None:
    traced(tmp_path, [deferred(step) for step in range(1, 10)])
    found = figures.timeline(tmp_path)
    assert found is not None
    loop = [(phase, round(start, 6), round(end, 6)) for phase, start, end in found["loop"]]
    assert loop == [
        ("forward", 0.1, 0.2),
        ("wait", 0.2, 0.4),
        ("optimizer", 0.4, 0.45),
        ("forward", 0.45, 0.6),
        ("backward", 0.6, 0.9),
        ("optimizer", 0.95, 1.0),
    ]
    wire = [(bucket, round(start, 6), round(end, 6)) for bucket, start, end in found["wire"]]
    assert wire == [(0, 0.0, 0.4), (1, 0.7, 0.85), (0, 0.8, 1.0)]


def test_the_step_of_median_length_is_shown(tmp_path: Path) -> None:
    ends = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 11.0, 12.0]
    steps = [
        (step, {"forward": [(end - 0.5, end - 0.2)], "optimizer": [(end - 0.1, end)]})
        for step, end in enumerate(ends, 1)
    ]
    traced(tmp_path, steps)
    found = figures.timeline(tmp_path)
    assert found is not None and found["loop"][-1][2] == pytest.approx(2.0)


def test_without_a_trace_or_a_step_after_warm_up_there_is_none(tmp_path: Path) -> None:
    assert figures.timeline(tmp_path) is None
    traced(tmp_path, [deferred(step) for step in range(1, 5)])
    assert figures.timeline(tmp_path) is None


def test_an_interval_without_others() -> None:
    assert without((0, 10), []) == [(0, 10)]
    assert without((0, 10), [(2, 3), (5, 12)]) == [(0, 2), (3, 5)]
    assert without((2, 3), [(0, 10)]) == []
    assert without((4, 8), [(0, 5), (6, 7), (9, 10)]) == [(5, 6), (7, 8)]
