"""Figures of runs from their folders: the clock to a held-out loss, and what evaluations change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pure.made_results import row, sample
from tests.pure.test_run_folder import event, written
from weft.cli.compare import _table
from weft.lab import figures
from weft.lab.report import write_report
from weft.lab.rows import Row
from weft.runtime.record.files import write_json
from weft.runtime.record.run_folder import events

STEP_S, START_S = 0.5, 7.0


def evaluated(losses: list[float], every: int, eval_s: float, *, step_s: float = STEP_S) -> list[dict[str, Any]]:
    """The events of a process that evaluates after every `every` steps, for `eval_s` each time."""
    rows, now, waiting = [], START_S, 0.0
    for step in range(1, len(losses) * every + 1):
        now += step_s + waiting
        more: dict[str, Any] = {"time_s": now, "step_s": step_s + waiting}
        waiting = 0.0
        if step % every == 0:
            more |= {"held_out_loss": losses[step // every - 1], "eval_s": eval_s}
            waiting = eval_s
        rows.append(event(step, **more))
    return rows


@pytest.mark.parametrize("eval_s", [0.0, 3.0])
@pytest.mark.parametrize(("target", "step"), [(4.0, 2), (3.0, 4), (2.9, 6), (1.0, None)])
def test_the_clock_to_a_held_out_loss_leaves_evaluations_out(
    tmp_path: Path, eval_s: float, target: float, step: int | None
) -> None:
    """With lockstep an evaluation takes as long as that of the slowest process."""
    for process in (0, 1):
        written(tmp_path, process, evaluated([3.5, 3.0, 2.5], 2, eval_s))
    found = figures.time_to_held_out_s(events(tmp_path), target)
    assert found == (pytest.approx(step * STEP_S) if step is not None else None)


@pytest.mark.parametrize("eval_s", [0.0, 3.0])
def test_the_clock_to_a_training_loss_leaves_them_out_as_well(tmp_path: Path, eval_s: float) -> None:
    rows = evaluated([3.5] * 5, 2, eval_s)
    for each in rows:
        each["loss"] = 10.0 - each["step"]
    written(tmp_path, 0, rows)
    assert figures.time_to_target_apart_s(tmp_path, 1, 2.0) == pytest.approx(10 * STEP_S)
    found = figures._time_to_target_s(events(tmp_path), [each["loss"] for each in rows], 3.0)
    assert found == pytest.approx(7 * STEP_S)


def test_without_lockstep_each_worker_has_a_clock_of_its_own(tmp_path: Path) -> None:
    """Worker 1 takes twice as long; the mean of both latest losses is at the target after its first evaluation."""
    written(tmp_path, 0, evaluated([3.5, 3.0, 2.0], 2, 3.0))
    written(tmp_path, 1, evaluated([3.0, 2.0], 2, 30.0, step_s=2 * STEP_S))
    early_s = STEP_S / 2  # training began a median step before the first one ended
    assert figures.time_to_held_out_apart_s(tmp_path, 2, 3.0) == pytest.approx(2 * 2 * STEP_S + early_s)
    assert figures.time_to_held_out_apart_s(tmp_path, 2, 2.5) == pytest.approx(6 * STEP_S + early_s)
    assert figures.time_to_held_out_apart_s(tmp_path, 2, 1.9) is None
    assert figures.time_to_held_out_apart_s(tmp_path, 2, None) is None


def test_the_held_out_loss_is_that_after_the_last_merge(tmp_path: Path) -> None:
    written(tmp_path, 0, [event(1), event(2)])
    write_json(tmp_path / "report.json", {"held_out_loss": 2.0})
    assert figures._held_out_loss(tmp_path, events(tmp_path)) is None and not figures.evaluates(tmp_path)
    written(tmp_path, 0, [event(3, held_out_loss=2.5), event(4)])
    assert figures._held_out_loss(tmp_path, events(tmp_path)) == 2.0 and figures.evaluates(tmp_path)
    (tmp_path / "report.json").unlink()
    assert figures._held_out_loss(tmp_path, events(tmp_path)) == 2.5


# --- shown ----------------------------------------------------------------------------------------------------------

MERGED = {"merges": 12, "merge_s": 3.25, "consensus": 0.0123, "held_out_loss": 2.875, "time_to_held_out_s": 61.5}
HEADS = ["merges", "held up by merges", "consensus", "held‑out loss", "time to held‑out loss 2.9"]


def heads(rows: list[dict[str, Any]]) -> list[str]:
    table = _table([Row(**each) for each in rows], 400)
    return [str(column.header).strip() for column in table.columns]


def test_columns_of_merges_stand_only_where_a_row_has_figures(tmp_path: Path) -> None:
    plain, merged = row("bsp / ring", 1.0), row("average / bsp / ring", 0.5, learning=None, **MERGED)
    own = ["to held-out s", "final held-out", "merges", "merge s", "consensus"]
    assert not set(heads([plain])) & set(own) and set(own) <= set(heads([plain, merged]))
    given = {**sample(), "rows": [plain, merged], "curves": {}, "timelines": {}}
    page = write_report(given, tmp_path).read_text(encoding="utf-8")
    assert [f'<th scope="col">{head}</th>' in page for head in HEADS] == [True] * 4 + [False]
    page = write_report({**given, "target_held_out": 2.9}, tmp_path).read_text(encoding="utf-8")
    assert all(f'<th scope="col">{head}</th>' in page for head in HEADS)
    for cell in ("12", "3.25 s", "0.012", "2.8750", "61.5 s", "not reached"):
        assert f"<td>{cell}</td>" in page, cell
    page = write_report({**given, "rows": [plain]}, tmp_path).read_text(encoding="utf-8")
    assert not any(f'<th scope="col">{head}</th>' in page for head in HEADS)
