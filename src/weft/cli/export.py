"""`weft export`: the steps of a run in another tool's format."""

from __future__ import annotations

import csv
import os
from calendar import timegm
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import strptime
from typing import Annotated, Any

import typer

from weft.cli import app
from weft.cli._command import Command
from weft.cli._show import JsonOption, console, emit, table
from weft.errors import JobError, UserError, nearest
from weft.runtime.record.run_folder import events, read_json

Events = list[dict[str, Any]]

_BATCH = 1000
"""The number of metrics that an MLflow server accepts at once."""


@app.command(cls=Command)
def export(
    run: Annotated[Path, typer.Argument(help="A run folder made by `weft train`.")],
    to: Annotated[str, typer.Option(help="Format: tensorboard, mlflow or csv.")],
    out: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Destination; inside RUN by default. For mlflow also an http(s) URI."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Export the steps of a run to TensorBoard, MLflow or CSV."""
    if to not in TARGETS:
        raise UserError(f"--to does not know '{to}'{nearest(to, TARGETS)}")
    write, name = TARGETS[to]
    steps = _steps(run)
    place = out or str(run / name)
    if "://" in place and not (to == "mlflow" and place.startswith(("http://", "https://"))):
        may = "a path or an http(s) address" if to == "mlflow" else "a path"
        raise UserError(f"--out is '{place}', but --to {to} writes to {may}; give one, or omit --out")
    try:
        rows = write(run, steps, place)
    except OSError as error:
        raise JobError(f"{place} cannot be written: {error.strerror or error}; give another place with --out") from None
    emit({"to": to, "path": place, "steps": len(steps), "rows": rows}, json)
    show = console(json)
    table(show, ["metric", "steps"], [[row["metric"], row["steps"]] for row in rows])
    show.print(f"\n{len(steps)} steps of {run} are in {place}", markup=False)


def _steps(run: Path) -> Events:
    """The events of a run; at least one."""
    if not run.is_dir():
        what = "is not a folder" if run.exists() else "does not exist"
        raise UserError(f"the run {run} {what}; give a run folder made by `weft train`, as in runs/NAME")
    steps = events(run)
    if not steps:
        raise UserError(f"{run} has no steps, because the run ended before its first; train again")
    return steps


def _counted(steps: Events, names: list[str]) -> list[dict[str, Any]]:
    return [{"metric": name, "steps": sum(event.get(name) is not None for event in steps)} for name in names]


def _names(steps: Events) -> list[str]:
    """The names of all measured or logged values, in the order of first appearance."""
    return [name for name in dict.fromkeys(key for event in steps for key in event) if name != "step"]


def _numbers(steps: Events) -> list[str]:
    """The names of numeric values, without `time_s`, which is the time axis of a tracker."""
    kinds = {name: [event[name] for event in steps if event.get(name) is not None] for name in _names(steps)}
    return [n for n, values in kinds.items() if n != "time_s" and values and all(map(_is_number, values))]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _started_s(run: Path) -> float | None:
    """The start of the run in seconds since 1970; the times of events count from about then."""
    try:
        return float(timegm(strptime(read_json(run, "environment.json")["started"], "%Y-%m-%dT%H:%M:%SZ")))
    except (LookupError, TypeError, ValueError):
        return None


def _wall_s(event: dict[str, Any], started_s: float | None) -> float | None:
    return None if started_s is None or event.get("time_s") is None else started_s + float(event["time_s"])


def _missing(package: str) -> UserError:
    return UserError(f"{package} is not installed, or cannot be imported; run `pip install {package}`")


# --- targets --------------------------------------------------------------------------------------------------------


def to_csv(run: Path, steps: Events, place: str) -> list[dict[str, Any]]:
    """One line per step, with an empty cell for a missing value. Replaces an earlier export."""
    path, names = Path(place), _names(steps)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.DictWriter(file, ["step", *names], lineterminator="\n")
        lines.writeheader()
        lines.writerows(steps)
    return _counted(steps, names)


def to_tensorboard(run: Path, steps: Events, place: str) -> list[dict[str, Any]]:
    """One scalar per metric and step. TensorBoard shows it instead of an earlier export to the same folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise _missing("tensorboard") from None
    names, started_s = _numbers(steps), _started_s(run)
    with SummaryWriter(place, purge_step=steps[0]["step"]) as writer:
        for event in steps:
            for name in names:
                if event.get(name) is not None:
                    writer.add_scalar(name, float(event[name]), event["step"], walltime=_wall_s(event, started_s))
    return _counted(steps, names)


def to_mlflow(run: Path, steps: Events, place: str) -> list[dict[str, Any]]:
    """A new MLflow run in the experiment `weft`, with the folder's name."""
    remote = "://" in place
    settings = {
        # The file store needs nothing but mlflow-skinny (a database needs SQLAlchemy). MLflow refuses it by default,
        # since it gets no new features, but metrics and parameters are all that is needed here.
        "MLFLOW_ALLOW_FILE_STORE": "true",
        # Importing MLflow would otherwise send telemetry over the network.
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Standard output may carry JSON.
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        # A missing server fails within seconds, not minutes.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    }
    with _environment(settings):
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise _missing("mlflow-skinny") from None
        try:
            client = MlflowClient(tracking_uri=place if remote else Path(place).absolute().as_uri())
            return _log_run(client, run, steps)
        except MlflowException as error:
            reason = str(error).splitlines()[0].rstrip(".")
            if remote and reason.startswith("API request"):
                raise JobError(f"no MLflow server answers at {place}; start one, or give another --out") from None
            raise JobError(f"MLflow rejects the run: {reason}; fix that, or give another --out") from None


def _log_run(client: Any, run: Path, steps: Events) -> list[dict[str, Any]]:
    from mlflow.entities import Metric, Param

    names, started_s, environment = _numbers(steps), _started_s(run), read_json(run, "environment.json")
    known = {name: environment.get(name) for name in ("strategy", "workers", "seed")}
    known |= {f"versions.{name}": version for name, version in environment.get("versions", {}).items()}

    def at_ms(event: dict[str, Any]) -> int:
        return round((_wall_s(event, started_s) or event["step"]) * 1000)

    metrics = [
        Metric(name, float(event[name]), at_ms(event), event["step"])
        for event in steps
        for name in names
        if event.get(name) is not None
    ]
    experiment = client.get_experiment_by_name("weft")
    number = experiment.experiment_id if experiment else client.create_experiment("weft")
    start_ms = None if started_s is None else round(started_s * 1000)
    made = client.create_run(number, start_time=start_ms, run_name=run.resolve().name).info.run_id
    status = "FAILED"
    try:
        client.log_batch(made, params=[Param(name, str(value)) for name, value in known.items()])
        for first in range(0, len(metrics), _BATCH):
            client.log_batch(made, metrics=metrics[first : first + _BATCH])
        status = "FINISHED"
    finally:
        client.set_terminated(made, status, end_time=at_ms(steps[-1]) if started_s is not None else None)
    return _counted(steps, names)


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables temporarily; variables that the user has set keep their value."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


TARGETS = {
    "tensorboard": (to_tensorboard, "tensorboard"),
    "mlflow": (to_mlflow, "mlruns"),
    "csv": (to_csv, "events.csv"),
}
"""For each --to: the writer, and its default name in the run folder."""
