"""The run folder: the only interface between a run and the tools that evaluate it."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from weft.errors import UserError
from weft.lazy import torch
from weft.ops import Spec


@contextmanager
def _understood(folder: Path) -> Iterator[None]:
    try:
        yield
    except (ArithmeticError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{folder} holds a run that cannot be parsed: {error!r}; train again") from None


def typed(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{str(value)[:40]!r} is not {kind}")
    return value


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of an event is a number; a loop may log text, too."""
    return isinstance(value, (int, float))


def model(folder: Path) -> list[Spec]:
    """The trained parameters, in the model's order."""
    rows = read_json(folder, "model.json")
    try:
        return [Spec(typed(str, name), tuple(map(int, shape)), _dtype(dtype)) for name, shape, dtype in rows]
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{folder / 'model.json'} cannot be parsed: {error}; give a run folder") from None


def _dtype(name: str) -> torch.dtype:
    return typed(torch.dtype, getattr(torch, typed(str, name), None))  # type: ignore[no-any-return]


def read_json(folder: Path, name: str) -> Any:
    """The content of a JSON file in a run folder. Raises UserError if it cannot be read."""
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} has no {name}, so it is not a run folder; give one made by `weft train`") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder / name} cannot be read: {error}") from None


def events(folder: Path) -> list[dict[str, Any]]:
    """One event per step over all processes: the mean step time, maxima of other times, values weighted by samples."""
    return list(stream(folder))


def stream(folder: Path) -> Iterator[dict[str, Any]]:
    """The same as an iterator, with only one step in memory."""
    read_json(folder, "environment.json")
    files = _files(folder)
    with _understood(folder):
        for _, parts in itertools.groupby(heapq.merge(*files, key=_step), key=_step):
            yield _joined(list(parts))


def by_process(folder: Path) -> list[list[dict[str, Any]]]:
    """The events of each process by itself."""
    with _understood(folder):
        return [list(lines) for lines in _files(folder)]


def _files(folder: Path) -> list[Iterator[dict[str, Any]]]:
    valid = _valid(folder)
    return [_without_evaluations(_lines(file, valid)) for file in sorted(folder.glob("events-*.jsonl"))]


def _without_evaluations(lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Events whose `step_s` does not hold the evaluation between the previous step and this one (its `eval_s`)."""
    evaluated_s, attempt = 0.0, None
    for event in lines:
        if evaluated_s and event.get("attempt", 0) == attempt:
            event["step_s"] = max(0.0, event["step_s"] - evaluated_s)
        given = event.get("eval_s")
        evaluated_s, attempt = (given if is_number(given) else 0.0), event.get("attempt", 0)
        yield event


def _step(event: dict[str, Any]) -> int:
    return int(event["step"])


def _lines(file: Path, valid: Mapping[int, float]) -> Iterator[dict[str, Any]]:
    """The events of one process, each step once, without those that a later attempt repeated or discarded."""
    reached = -1
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
                step, attempt = typed(int, event["step"]), event.get("attempt", 0)
                if reached < step <= valid.get(attempt, math.inf) and "samples" in event:
                    yield event
                    reached = step
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue  # the truncated last line of a killed process


def _valid(folder: Path) -> dict[int, float]:
    """By attempt: the last step that counts, which is the start of the next attempt."""
    starts: list[int] = []
    with suppress(OSError), (folder / "resumed.jsonl").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                starts.append(typed(int, json.loads(line)["step"]))
            except (ValueError, TypeError, KeyError, RecursionError):
                starts.append(0)
    return {attempt: min(starts[attempt:]) for attempt in range(len(starts))}


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {"step": parts[0]["step"]}
    samples = sum(part["samples"] for part in parts)
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part[key] for part in parts if part.get(key) is not None]
        if not values:
            joined[key] = None
        elif key == "step_s":
            joined[key] = statistics.mean(values)  # a process that waits in one step is early in the next
        elif key.endswith("_s"):
            joined[key] = max(values)
        elif key in ("wire_bytes", "samples"):
            joined[key] = sum(values)
        elif key != "step":
            known = [(part["samples"] or 1, part[key]) for part in parts if is_number(part.get(key))]
            weight = sum(w for w, _ in known)
            joined[key] = sum(w * v for w, v in known) / weight if known else values[-1]
    return joined | {"samples": samples}


def summary(folder: Path) -> dict[str, Any]:
    """The run as one object, as in `weft train --json`; the first steps are warm-up and excluded from times."""
    environment = read_json(folder, "environment.json")
    series = {name: array("d") for name in ("step_s", "samples", "wire_bytes")}
    last: dict[str, Any] | None = None
    merges = Merges()
    with _understood(folder):
        for last in stream(folder):
            merges.add(last)
            for name, values in series.items():
                values.append(last[name])
    if last is None:
        raise UserError(
            f"{folder} has no optimizer step: the script ended before its first; call run.distribute(model, "
            "optimizer), and check that the loader gives batches"
        )
    with _understood(folder):
        row = _row(folder, environment, series, last)
        if environment.get("merges_models"):
            row |= asdict(merges)
    if (folder / "report.json").exists():
        row["report"] = read_json(folder, "report.json")
    if found := servers(folder):
        row["servers"] = found
    return row


def step_limit(folder: Path) -> int | None:
    """The number of steps after which the run was to end; None if only the job's loop ends it."""
    environment = read_json(folder, "environment.json")
    with _understood(folder):
        limit: int | None = typed(int | None, environment["steps"])
    return limit


@dataclass
class Merges:
    """The merges of local optimizers in the steps of a run."""

    merges: int = 0
    """The number of merged fragments; a model that is merged as a whole is one fragment."""
    merge_s: float = 0.0
    """Seconds for which merges held the loop up."""
    consensus: float | None = None
    """At the last merge: the distance of the local models from their mean, relative to the norm of the anchor."""

    def add(self, event: Mapping[str, Any]) -> None:
        """Count the merges of one step."""
        self.merges += round(event.get("merges") or 0)
        self.merge_s += event.get("merge_s") or 0.0
        self.consensus = event.get("consensus", self.consensus)


def servers(folder: Path) -> list[dict[str, Any]]:
    """The statistics of each parameter server (`server/statistics`), if there are any."""
    with _understood(folder):
        rows = [typed(dict, read_json(folder, file.name)) for file in folder.glob("server-*.json")]
        return sorted(rows, key=lambda row: typed(int, row["server"]))


def asynchrony(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The statistics of all servers in a few figures: staleness, and the longest wait between two workers."""
    late = Counter[int]()
    waits = Counter[tuple[int, int]]()
    for row in rows:
        for _, staleness, count in row["staleness"]:
            late[staleness] += count
        for who, on, seconds in row["waits"]:
            waits[who, on] = max(waits[who, on], seconds)  # a worker waits for all servers at the same time
    most = max(waits, key=lambda pair: waits[pair], default=None)
    return {
        "staleness_mean": sum(k * n for k, n in late.items()) / late.total() if late else None,
        "staleness_most": max(late, default=None),
        "queue_most": max((row["queue_most"] or 0 for row in rows), default=None),
        "server_bytes": max((row["received_bytes"] + row["sent_bytes"] for row in rows), default=None),
        "longest_wait": [*most, waits[most]] if most is not None else None,
    }


def by_period(values: Sequence[float], period: int) -> list[float]:
    """Means over whole periods, for steps that differ within a period."""
    whole = len(values) // period
    return [statistics.mean(values[i * period : (i + 1) * period]) for i in range(whole)] or [statistics.mean(values)]


def _row(
    folder: Path, environment: dict[str, Any], series: Mapping[str, Sequence[float]], last: Mapping[str, Any]
) -> dict[str, Any]:
    period = typed(int, environment.get("period", 1))
    count = len(series["step_s"])
    times = by_period(series["step_s"][min(5, count // 2) :], period)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    step_s = statistics.median(times)
    return {
        "strategy": environment["strategy"],
        "workers": environment["workers"],
        "steps": count,
        "step_s": step_s,
        "step_s_spread": quartiles[2] - quartiles[0],
        "samples_per_s": statistics.median(series["samples"]) / step_s,
        "wire_bytes_worker": statistics.median(by_period(series["wire_bytes"], period)) / environment["workers"],
        "final_loss": last.get("loss"),
        "folder": str(folder),
    }
