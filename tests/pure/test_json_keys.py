"""The keys of comparisons and summaries as users parse them, spelled out: a rename in the source fails here."""

from __future__ import annotations

import re
from pathlib import Path

from tests.pure.test_run_folder import event, written
from weft.lab.rows import Row
from weft.runtime.record.files import write_json
from weft.runtime.record.run_folder import asynchrony, summary
from weft.runtime.server.statistics import Statistics

ROW = ["name", "kind", "sentence", "step_s", "step_s_spread", "samples_per_s", "speedup", "wire_bytes_worker"]
ROW += ["wire_bytes_link", "exposed_s", "compute_s", "bound_s", "bound_share", "final_loss", "time_to_target_s"]
ROW += ["held_out_loss", "time_to_held_out_s", "merges", "merge_s", "consensus"]
ROW += ["learning", "asynchrony", "compute", "error"]
COMPARISON = ["job", "command", "compute", "steps", "warmup", "seeds", "target_loss", "target_held_out", "date"]
COMPARISON += ["cluster", "machine", "one_host", "interrupted", "rows", "curves", "timelines", "folder", "headline"]
MACHINE = ["cores", "threads", "system", "processor", "cpu_share", "steal_share", "other_cpu_share", "versions"]
ASYNCHRONY = ["staleness_mean", "staleness_most", "queue_most", "server_bytes", "longest_wait"]
SERVER = ["server", "updates", "staleness", "queue_mean", "queue_most", "received_bytes", "sent_bytes", "waits"]
SUMMARY = ["strategy", "workers", "steps", "step_s", "step_s_spread", "samples_per_s", "wire_bytes_worker"]
SUMMARY += ["final_loss", "folder"]
MERGES = ["merges", "merge_s", "consensus"]


def test_keys_of_a_comparison() -> None:
    row = Row(name="bsp / ring", kind="strategy", sentence="", compute="real").to_json()
    assert list(row) == ROW
    assert list(asynchrony([])) == ASYNCHRONY


def test_the_documentation_explains_every_figure_of_a_comparison() -> None:
    text = (Path(__file__).parents[2] / "docs/lab.md").read_text(encoding="utf-8")
    columns = re.findall(r"(?m)^\|[^|]*\|([^|]*`[^|]*)\|", text)
    explained = [key for column in columns for key in re.findall(r"`(\w+)`", column)]
    assert set(explained) == set(ROW) - {"name", "kind", "sentence"}


def test_keys_of_a_summary(tmp_path: Path) -> None:
    """`weft train --json`: `report` where the job has written one, `servers` and merges where there are any."""
    written(tmp_path, 0, [event(step) for step in range(1, 9)])
    assert list(summary(tmp_path)) == SUMMARY
    write_json(tmp_path / "report.json", {"held_out_loss": 2.5})
    write_json(tmp_path / "server-0.json", Statistics(workers=2).row(0, updates=8))
    found = summary(tmp_path)
    assert list(found) == [*SUMMARY, "report", "servers"]
    assert [list(server) for server in found["servers"]] == [SERVER]
    about = {"strategy": "average(every=4) / bsp / direct", "workers": 2, "period": 4, "merges_models": True}
    write_json(tmp_path / "environment.json", about)
    assert list(summary(tmp_path)) == [*SUMMARY, *MERGES, "report", "servers"]
