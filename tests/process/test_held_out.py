"""`text --eval-every`, and the merges of a run in its summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.process.commands import Command, result
from weft.runtime.record.run_folder import events

AVERAGE = "average(every=2) / bsp / direct"
Trained = tuple[dict[str, Any], list[dict[str, Any]]]


def trained(folder: Path, name: str, strategy: str, *options: Any, every: int | None = 2) -> Trained:
    """The summary and the events of five steps of `text`, by two workers."""
    line = ["text", "-n", 2, *options, "--steps", 5, "--strategy", strategy, "--out", name, "--json", "-"]
    evaluating = ["--eval-every", every] if every is not None else []
    summary = result("train", *line, "--", "--size", "tiny", "--batch", 2, *evaluating, cwd=folder)
    return summary, events(folder / name)


def held_out(found: list[dict[str, Any]]) -> dict[int, float]:
    """The held-out losses, by step."""
    return {event["step"]: event["held_out_loss"] for event in found if event.get("held_out_loss") is not None}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("held-out")


@pytest.fixture(scope="module")
def averaged(place: Path) -> Trained:
    return trained(place, "averaged", AVERAGE)


def test_the_merged_model_is_evaluated_every_few_steps_and_after_the_last(averaged: Trained) -> None:
    """After a step between two merges the loss is that of the last merge."""
    summary, found = averaged
    losses = held_out(found)
    assert list(losses) == [2, 4, 5] and losses[2] > losses[4] == losses[5]
    assert all((event.get("eval_s") or 0) > 0 for event in found if event["step"] in losses)
    assert summary["report"]["held_out_loss"] != losses[5], "the run ends with a merge"


def test_the_merges_of_a_run_are_in_its_summary(averaged: Trained) -> None:
    summary, found = averaged
    assert summary["merges"] == 2 and summary["merge_s"] > 0
    assert summary["consensus"] == found[3]["consensus"] > 0


def test_evaluating_changes_nothing_in_a_run(averaged: Trained, place: Path) -> None:
    """Nor does the number of processes, but in the last bits of means."""
    _, found = averaged
    summary, plain = trained(place, "plain", AVERAGE, every=None)
    assert [event["loss"] for event in plain] == [event["loss"] for event in found] and held_out(plain) == {}
    assert summary["report"] == averaged[0]["report"]
    _, joined = trained(place, "joined", AVERAGE, "--processes", 1)
    assert held_out(joined) == held_out(found)
    assert [event["loss"] for event in joined] == pytest.approx([event["loss"] for event in found])


@pytest.mark.parametrize(
    "strategy", ["bsp / direct / priority", "asp / parameter_server", "bsp / parameter_server", "asp / shared_memory"]
)
def test_other_strategies_evaluate_their_model(strategy: str, tmp_path: Path) -> None:
    summary, found = trained(tmp_path, "run", strategy)
    losses = held_out(found)
    assert list(losses) == [2, 4, 5] and "merges" not in summary
    if strategy.startswith("bsp"):
        assert losses[5] == summary["report"]["held_out_loss"]


def test_a_run_prints_its_merges(tmp_path: Path, weft: Command) -> None:
    line = ["train", "wide", "-n", 2, "--steps", 4, "--strategy", "average(every=2) / bsp / direct"]
    done = weft(*line, "--", "--size", "tiny", cwd=tmp_path)
    assert "merges" in done.stdout and "2, which held the loop up for " in done.stdout, done.stderr
    assert "of the anchor's norm" in done.stdout


@pytest.mark.parametrize("every", ["0", "-1", "2.5", "often"])
def test_a_number_of_steps_that_is_none_is_refused(every: str, tmp_path: Path, weft: Command) -> None:
    done = weft("train", "text", "--steps", 2, "--", "--size", "tiny", "--eval-every", every, cwd=tmp_path)
    assert done.returncode != 0 and f"'{every}' is not a whole number of at least 1" in done.stdout + done.stderr
