"""`weft export` and `weft doctor` as commands; what is exported is read back with the other tool's own reader."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from calendar import timegm
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import strptime
from typing import Any

import pytest

from tests.process.commands import Command, result, weft
from weft.cli import main
from weft.cli.export import to_csv, to_mlflow, to_tensorboard
from weft.runtime.record.run_folder import events, read_json

STEPS = 8
CHECKS = [
    "Python",
    "PyTorch",
    "Gloo",
    "CUDA GPUs",
    "NCCL",
    "disk for runs/",
    "port on loopback",
    "two processes meet",
    "C++ compiler",
    "network namespaces without root",
    "/dev/shm",
    "cores and threads",
    "tensorboard",
    "mlflow",
]


def refusal(*args: Any, cwd: Path, **env: str) -> str:
    """The one sentence that a command leaves with."""
    done = weft(*args, cwd=cwd, **env)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("weft: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, weft: Command) -> Path:
    cwd = tmp_path_factory.mktemp("export")
    row = weft("train", "wide", "-n", 2, "--steps", STEPS, "--out", "run", "--", "--size", "tiny", cwd=cwd)
    assert row.returncode == 0, row.stderr
    return cwd / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may write to, at a place with an awkward name."""
    return Path(shutil.copytree(trained, tmp_path / "a run#1 ü"))


def written(folder: Path, steps: list[dict[str, Any]]) -> Path:
    """A run folder with these events and nothing else."""
    folder.mkdir()
    about = {"strategy": "bsp / ring", "workers": 1, "seed": 7, "started": "2026-01-02T03:04:05Z", "versions": {}}
    (folder / "environment.json").write_text(json.dumps(about))
    full = [{"time_s": 0.5, "step_s": 0.5, "wire_bytes": 0, "samples": 1} | event for event in steps]
    (folder / "events-0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in full))
    return folder


def drawn(run: Path) -> list[str]:
    return [name for name in events(run)[0] if name not in ("step", "time_s")]


def started_s(run: Path) -> float:
    return timegm(strptime(read_json(run, "environment.json")["started"], "%Y-%m-%dT%H:%M:%SZ"))


# --- csv ------------------------------------------------------------------------------------------------------------


def test_csv_holds_the_events(run: Path, tmp_path: Path) -> None:
    said = result("export", run, "--to", "csv", cwd=tmp_path)
    with (run / "events.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [{name: float(cell) for name, cell in line.items()} for line in lines] == events(run)
    assert said["path"] == str(run / "events.csv") and said["steps"] == STEPS
    assert said["rows"] == [{"metric": name, "steps": STEPS} for name in events(run)[0] if name != "step"]


def test_csv_leaves_a_cell_empty_where_a_step_has_no_value(tmp_path: Path) -> None:
    steps = [{"step": 1, "loss": math.nan}, {"step": 2, "loss": 1.5, "note": 'say "hi", twice'}, {"step": 3}]
    run = written(tmp_path / "run", steps)
    rows = to_csv(run, events(run), str(tmp_path / "new" / "table.csv"))
    with (tmp_path / "new" / "table.csv").open(encoding="utf-8", newline="") as file:
        cells = [(line["step"], line["loss"], line["note"]) for line in csv.DictReader(file)]
    assert cells == [("1", "nan", ""), ("2", "1.5", 'say "hi", twice'), ("3", "", "")]
    assert {row["metric"]: row["steps"] for row in rows}["note"] == 1


# --- trackers -------------------------------------------------------------------------------------------------------


def test_tensorboard_reads_the_scalars_back_even_after_a_second_export(run: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):
        said = result("export", run, "--to", "tensorboard", cwd=tmp_path)
    read = EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == sorted(drawn(run)) == sorted(row["metric"] for row in said["rows"])
    for name in drawn(run):
        points = [(point.step, point.value) for point in read.Scalars(name)]
        assert points == [(event["step"], pytest.approx(event[name], rel=1e-6)) for event in events(run)]
    times = [point.wall_time for point in read.Scalars("loss")]
    assert times == pytest.approx([started_s(run) + event["time_s"] for event in events(run)], abs=1e-3, rel=0)


def test_mlflow_reads_metrics_and_parameters_back(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = result("export", run, "--to", "mlflow", cwd=tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=Path(said["path"]).as_uri())
    experiment = client.get_experiment_by_name("weft")
    assert experiment is not None
    [made] = client.search_runs([experiment.experiment_id])
    about = read_json(run, "environment.json")
    assert made.data.params == {
        "strategy": about["strategy"],
        "workers": "2",
        "seed": "0",
        **{f"versions.{name}": version for name, version in about["versions"].items()},
    }
    assert (made.info.run_name, made.info.status) == (run.name, "FINISHED")
    assert set(made.data.metrics) == set(drawn(run)) == {row["metric"] for row in said["rows"]}
    for name in drawn(run):
        history = client.get_metric_history(made.info.run_id, name)
        assert [(point.step, point.value) for point in history] == [(e["step"], e[name]) for e in events(run)]
        assert history[0].timestamp == round((started_s(run) + events(run)[0]["time_s"]) * 1000)


def test_trackers_leave_text_out_and_take_values_that_are_not_finite(tmp_path: Path) -> None:
    steps = [{"step": 1, "loss": math.nan, "note": "warm"}, {"step": 2, "loss": math.inf}]
    run = written(tmp_path / "run", steps)
    for write in (to_tensorboard, to_mlflow):
        rows = {row["metric"]: row["steps"] for row in write(run, events(run), str(tmp_path / write.__name__))}
        assert rows["loss"] == 2 and "note" not in rows


@contextmanager
def tracking_server() -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """As much of an MLflow server as an export asks for: its address, and what it has been told."""
    told: list[tuple[str, dict[str, Any]]] = []
    info = {"run_id": "r1", "run_uuid": "r1", "experiment_id": "1", "status": "RUNNING"}
    answers = {"experiments/create": {"experiment_id": "1"}, "runs/create": {"run": {"info": info, "data": {}}}}
    answers |= {"runs/log-batch": {}, "runs/update": {"run_info": info}}

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            what = self.path.partition("/mlflow/")[2].partition("?")[0]
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            told.append((what, json.loads(body) if body else {}))
            found = answers.get(what)
            text = json.dumps({"error_code": "RESOURCE_DOES_NOT_EXIST"} if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = answer  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", told
        finally:
            server.shutdown()
            thread.join()


def test_mlflow_over_http(run: Path, tmp_path: Path) -> None:
    with tracking_server() as (address, told):
        said = result("export", run, "--to", "mlflow", "--out", address, cwd=tmp_path)
    assert said["path"] == address
    sent = [body for what, body in told if what == "runs/log-batch"]
    assert sum(len(body.get("metrics", ())) for body in sent) == STEPS * len(drawn(run))
    assert {each["key"] for body in sent for each in body.get("params", ())} >= {"strategy", "workers", "seed"}
    assert told[-1][0] == "runs/update" and told[-1][1]["status"] == "FINISHED"
    assert sorted(run.parent.iterdir()) == [run]
    once = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    gone = refusal("export", run, "--to", "mlflow", "--out", address, cwd=tmp_path, **once)
    assert f"no MLflow server answers at {address}" in gone


# --- what cannot be exported ----------------------------------------------------------------------------------------


def test_refusals_are_one_sentence(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: ten starts of Python would take longer than all the rest."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    empty = written(tmp_path / "empty", [])
    broken = written(tmp_path / "broken", [])
    (broken / "events-0.jsonl").write_bytes(b"\xff\xfe 1\n")
    for words, arguments in [
        ("did you mean 'tensorboard'?", [run, "--to", "tensorbord"]),
        ("known: csv, mlflow, tensorboard", [run, "--to", "wandb"]),
        ("not a run folder", ["other", "--to", "csv"]),
        ("does not exist", ["nowhere", "--to", "csv"]),
        ("is not a folder", [run / "report.json", "--to", "csv"]),
        ("has no steps", [empty, "--to", "csv"]),
        ("has no steps", [broken, "--to", "csv"]),
        ("cannot be written", [run, "--to", "csv", "--out", tmp_path]),
        ("writes to a path;", [run, "--to", "csv", "--out", "http://localhost:1"]),
        ("a path or an http(s) address;", [run, "--to", "mlflow", "--out", "sqlite:///x.db"]),
    ]:
        monkeypatch.setattr(sys, "argv", ["weft", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert (left.value.code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("weft: ") and words in err


@pytest.mark.parametrize("target", ["tensorboard", "mlflow"])
def test_a_missing_tracker_names_the_extra(run: Path, tmp_path: Path, target: str) -> None:
    before = sorted(run.iterdir())
    said = refusal("export", run, "--to", target, cwd=tmp_path, PYTHONPATH=blocker(tmp_path, target))
    assert f"pip install {target}" in said  # mlflow-skinny for mlflow
    assert sorted(run.iterdir()) == before


def blocker(folder: Path, module: str) -> str:
    """A search path on which importing a module fails as if it were not installed."""
    place = folder / "blocked"
    place.mkdir()
    (place / f"{module}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{module}'\", name='{module}')\n")
    return str(place)


# --- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_needs_only_what_is_required_and_leaves_nothing(tmp_path: Path) -> None:
    scratch, work = tmp_path / "tmp", tmp_path / "work"
    scratch.mkdir()
    work.mkdir()
    said = result("doctor", cwd=work, TMPDIR=str(scratch), PATH="/nowhere", OMP_NUM_THREADS="100000")
    assert said["ok"] is True
    assert [row["check"] for row in said["rows"]] == CHECKS
    for row in said["rows"]:
        assert list(row) == ["check", "ok", "found", "remedy"]
        assert row["found"] and row["ok"] == (row["remedy"] == "")
    assert {row["check"] for row in said["rows"] if not row["ok"]} >= {"C++ compiler", "cores and threads"}
    assert [*scratch.iterdir(), *work.iterdir()] == []


def test_doctor_fails_where_workers_cannot_meet(tmp_path: Path) -> None:
    """In a network namespace of its own, in which not even the loopback interface is up."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces here")
    command = ["unshare", "-rn", sys.executable, "-m", "weft.cli", "doctor", "--json", "out.json"]
    env = os.environ | {"TMPDIR": str(scratch)}
    broken = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert broken.returncode == 1 and broken.stderr == ""
    assert "!! two processes meet: allow local TCP connections on loopback" in broken.stdout
    said = json.loads((tmp_path / "out.json").read_text())
    assert said["ok"] is False
    assert "two processes meet" in [row["check"] for row in said["rows"] if not row["ok"]]
    assert list(scratch.iterdir()) == []
