"""What a run folder says: each step once, as the latest attempt took it, in little memory; files whole or unchanged."""

from __future__ import annotations

import json
import os
import resource
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from weft.cli.train import _tidy
from weft.errors import UserError
from weft.runtime.record.files import append_line, hold, write_json
from weft.runtime.record.new_folder import new_folder
from weft.runtime.record.run_folder import events, summary


def event(step: int, **more: Any) -> dict[str, Any]:
    times = {"time_s": 1.0, "step_s": 0.1, "forward_s": 0.01, "backward_s": 0.02, "exposed_s": 0.01, "hidden_s": 0.01}
    return {"step": step, **times, "wire_bytes": 123, "samples": 32, "loss": 1.25, **more}


def written(folder: Path, process: int, rows: list[dict[str, Any]]) -> None:
    with (folder / f"events-{process}.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    write_json(folder / "environment.json", {"strategy": "bsp / direct", "workers": 2, "period": 1})


def test_steps_that_a_later_attempt_took_again_or_left_behind_do_not_count(tmp_path: Path) -> None:
    for process in (0, 1):
        written(tmp_path, process, [event(step, loss=0.0) for step in range(1, 31)])
    append_line(tmp_path / "resumed.jsonl", {"attempt": 1, "step": 20})
    written(tmp_path, 0, [event(step, loss=1.0, attempt=1) for step in range(21, 26)])
    assert [row["step"] for row in events(tmp_path)] == list(range(1, 26))
    assert [row["loss"] for row in events(tmp_path)] == [0.0] * 20 + [1.0] * 5
    assert [row["samples"] for row in events(tmp_path)] == [64] * 20 + [32] * 5
    append_line(tmp_path / "resumed.jsonl", {"attempt": 2, "step": 0})  # a run that started over
    written(tmp_path, 0, [event(step, loss=2.0, attempt=2) for step in range(1, 4)])
    assert [(row["step"], row["loss"]) for row in events(tmp_path)] == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert (summary(tmp_path)["steps"], summary(tmp_path)["final_loss"]) == (3, 2.0)


def test_a_summary_counts_the_merges_of_local_optimizers(tmp_path: Path) -> None:
    """Seconds are those of the slowest process in each step, and the consensus is the last one."""
    for process in (0, 1):
        rows = [event(step, **merge(step, 0.1 + process)) if step % 2 == 0 else event(step) for step in range(1, 6)]
        written(tmp_path, process, rows)
    assert "merges" not in summary(tmp_path)
    environment = {"strategy": "average(every=2) / bsp / direct", "workers": 2, "period": 2}
    write_json(tmp_path / "environment.json", environment | {"merges_models": True})
    found = summary(tmp_path)
    assert (found["merges"], found["consensus"]) == (4, 0.4)
    assert found["merge_s"] == pytest.approx(2 * 1.1)


def merge(step: int, seconds: float) -> dict[str, Any]:
    return {"merges": 2, "merge_s": seconds, "consensus": step / 10}


def test_a_run_without_a_merge_has_no_consensus(tmp_path: Path) -> None:
    written(tmp_path, 0, [event(1), event(2)])
    environment = {"strategy": "outer / bsp / direct", "workers": 2, "period": 40, "merges_models": True}
    write_json(tmp_path / "environment.json", environment)
    assert [summary(tmp_path)[key] for key in ("merges", "merge_s", "consensus")] == [0, 0.0, None]


def test_a_step_does_not_hold_the_evaluation_before_it(tmp_path: Path) -> None:
    """Each process's own evaluation; a resumed process has made none before its first step."""
    for process, seconds in enumerate((0.4, 0.6)):
        rows = [event(1, eval_s=seconds), event(2, step_s=0.1 + seconds), event(3, eval_s=seconds)]
        written(tmp_path, process, rows)
    assert [row["step_s"] for row in events(tmp_path)] == pytest.approx([0.1] * 3)
    assert [row.get("eval_s") for row in events(tmp_path)] == [0.6, None, 0.6]
    append_line(tmp_path / "resumed.jsonl", {"attempt": 1, "step": 3})
    written(tmp_path, 0, [event(4, attempt=1)])
    assert events(tmp_path)[3]["step_s"] == 0.1


def test_a_summary_needs_little_memory(tmp_path: Path) -> None:
    """About 100 bytes a step, however many processes there are."""
    for process in range(3):
        written(tmp_path, process, [event(step) for step in range(1, 4001)])
    summary(tmp_path)
    tracemalloc.start()
    try:
        assert summary(tmp_path)["steps"] == 4000
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 2**20


def refused(act: Callable[[], Any]) -> str:
    """Do it in a process of its own; the sentence with which it was refused, or nothing."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            act()
        except UserError as error:
            os.write(there, str(error).encode())
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_a_file_that_cannot_be_rewritten_is_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    write_json(path, {"job": "before"})

    def rewrite() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
        write_json(path, [9] * 99)

    assert "cannot be written: File too large" in refused(rewrite)
    assert json.loads(path.read_text()) == {"job": "before"}
    assert [each.name for each in tmp_path.iterdir()] == ["launch.json"]


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    with hold(tmp_path, "run"):
        assert "is in use by a running run; wait for its end, or stop it first" in refused(
            lambda: hold(tmp_path, "run")
        )
    assert refused(lambda: hold(tmp_path, "run")) == ""


def test_a_folder_without_a_step_is_said(tmp_path: Path) -> None:
    written(tmp_path, 0, [])
    with pytest.raises(UserError, match="has no optimizer step"):
        summary(tmp_path)


def test_launchers_that_start_together_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ready = threading.Barrier(4)

    def launcher(_: int) -> tuple[Path, bool]:
        ready.wait()
        return new_folder(None, "job")

    with ThreadPoolExecutor(4) as launchers:
        found = list(launchers.map(launcher, range(4)))
    assert len({folder for folder, _ in found}) == 4 and all(made for _, made in found)
    assert sorted(Path("runs").iterdir()) == sorted(folder for folder, _ in found)
    first, *rest = (folder for folder, _ in found)
    (first / "launch.json").write_text("{}")
    _tidy(first, False)  # what another launcher has made
    assert (first / "launch.json").exists()
    for folder in (first, *rest):
        _tidy(folder, True)
    assert not Path("runs").exists()
