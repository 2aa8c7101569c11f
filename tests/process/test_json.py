"""The keys of every command's `--json`, pinned: programs read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.process.commands import result
from weft.cli import COMMANDS

TRAIN = ["strategy", "workers", "steps", "step_s", "step_s_spread", "samples_per_s", "wire_bytes_worker"]
TRAIN += ["final_loss", "folder", "report"]

KEYS: dict[str, tuple[list[str], list[str]]] = {
    "train": ([*TRAIN, "rows"], TRAIN),
    "check": (
        ["strategy", "exact", "kind", "copies", "rounds", "wire_bytes", "rows"],
        ["question", "axis", "answer", "meaning"],
    ),
    "answers": (["rows"], ["axis", "name", "default", "meaning", "parameters"]),
    "systems": (["rows"], ["id", "aliases", "name", "group", "surveys", "status", "strategy", "note"]),
    "export": (["to", "path", "steps", "rows"], ["metric", "steps"]),
    "doctor": (["ok", "rows"], ["check", "ok", "found", "remedy"]),
}
"""For each command: the keys of the result, and of each of its rows."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("json")


@pytest.fixture(scope="module")
def trained(place: Path) -> dict[str, Any]:
    """Options of the job follow `--`, so --json stands before it."""
    options = ["-n", 2, "--steps", 3, "--out", "run", "--json", "-"]
    return result("train", "wide", *options, "--", "--size", "tiny", cwd=place)


def test_every_command_is_pinned() -> None:
    assert set(KEYS) == set(COMMANDS) - {"compare", "lab", "join"}, "pinned in tests/net, or silent"


@pytest.mark.parametrize("command", KEYS)
def test_keys(command: str, place: Path, trained: dict[str, Any]) -> None:
    arguments = {"check": ["bsp / ring"], "export": ["run", "--to", "csv"]}
    said = trained if command == "train" else result(command, *arguments.get(command, []), cwd=place)
    assert (list(said), {tuple(row) for row in said["rows"]}) == (KEYS[command][0], {tuple(KEYS[command][1])})
    parameters = {tuple(each) for row in said["rows"] for each in row.get("parameters", ())}
    assert parameters == ({("name", "default", "meaning")} if command == "answers" else set())


def test_a_run_is_one_row_and_its_own_summary(trained: dict[str, Any]) -> None:
    [row] = trained["rows"]
    assert row == {key: trained[key] for key in TRAIN}
    assert set(row["report"]) == {"held_out_loss", "held_out_accuracy"}
