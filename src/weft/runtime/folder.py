"""The run folder, the only interface between a run and whatever looks at it: what is in it, and what it says."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import weft
from weft import jobs
from weft.errors import UserError
from weft.ops import Spec
from weft.runtime.launch import Launch
from weft.runtime.record import write_json, write_text, writing
from weft.runtime.world import World
from weft.store.checkpoint import Policy
from weft.strategy import Strategy


def describe(
    folder: Path, strategy: Strategy, world: World, device: torch.device, seed: int, steps: int | None
) -> None:
    """Write what the run is and where it runs."""
    write_text(folder / "strategy.toml", f"# {strategy}\n{strategy.to_toml()}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    environment = {
        "strategy": str(strategy),
        "period": strategy.optimization.period,
        "peer": os.environ.get("WEFT_PEER"),
        "workers": world.workers,
        "processes": world.processes,
        "steps": steps,
        "seed": seed,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": str(device),
        "device_name": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "versions": {"weft": weft.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    write_json(folder / "environment.json", environment)


_LAUNCH = "launch.json"


def describe_launch(folder: Path, spec: Launch) -> None:
    """Write how the run was started, so that it can go on."""
    policy = spec.policy
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    word = {
        "job": spec.job if jobs.path(spec.job) else str(Path(spec.job).absolute()),
        "args": list(spec.args),
        "workers": spec.workers,
        "processes": spec.processes,
        "strategy": str(spec.strategy) if spec.strategy else None,
        "steps": spec.steps,
        "seed": spec.seed,
        "device": spec.device,
        "share_gpus": spec.share_gpus,
        "policy": [policy.every, policy.last, policy.milestone] if policy else None,
    }
    write_json(folder / _LAUNCH, word)


def launched(folder: Path) -> Launch:
    """How a run was started."""
    word = read_json(folder, _LAUNCH)
    try:
        policy = word["policy"]
        return Launch(
            job=_a(str, word["job"]),
            args=tuple(_a(str, each) for each in word["args"]),
            workers=_a(int, word["workers"]),
            processes=_a(int | None, word["processes"]),
            strategy=Strategy.parse(word["strategy"]) if word["strategy"] is not None else None,
            steps=_a(int | None, word["steps"]),
            seed=_a(int | None, word["seed"]),
            device=_a(str, word["device"]),
            share_gpus=_a(bool, word["share_gpus"]),
            policy=Policy(every=policy[0], last=policy[1], milestone=policy[2]) if policy else None,
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{folder / _LAUNCH} cannot be understood: {error}; give a folder that `weft train` made"
        ) from None


@contextmanager
def _understood(folder: Path) -> Iterator[None]:
    try:
        yield
    except (ArithmeticError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{folder} holds a run that cannot be understood: {error!r}") from None


def _a(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{str(value)[:40]!r} is not {kind}")
    return value


def describe_model(folder: Path, specs: Sequence[Spec]) -> None:
    """Write what trains: the parameters' names, shapes and dtypes."""
    write_json(folder / "model.json", [[spec.name, list(spec.shape), str(spec.dtype)[6:]] for spec in specs])


def model(folder: Path) -> list[Spec]:
    """The parameters that train, in the model's order."""
    rows = read_json(folder, "model.json")
    try:
        return [Spec(_a(str, name), tuple(map(int, shape)), _dtype(dtype)) for name, shape, dtype in rows]
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{folder / 'model.json'} cannot be understood: {error}; give a folder of a run") from None


def _dtype(name: str) -> torch.dtype:
    return _a(torch.dtype, getattr(torch, _a(str, name), None))  # type: ignore[no-any-return]


def read_json(folder: Path, name: str) -> Any:
    """A JSON file of a run folder, or an error that says what is wrong with the folder."""
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} has no {name}, so it is not a run folder; give one that `weft train` made") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder / name} cannot be read: {error}") from None


def events(folder: Path) -> list[dict[str, Any]]:
    """One event per step, over all processes: the mean step time, other times of the slowest, values by samples."""
    read_json(folder, "environment.json")
    by_step: dict[int, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("events-*.jsonl")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                event = json.loads(line)
                by_step.setdefault(_a(int, event["step"]), []).append(event | {"samples": event["samples"]})
            except (ValueError, TypeError, KeyError, RecursionError):
                continue  # the last line of a process that was killed
    with _understood(folder):
        return [_joined(_latest(by_step[step])) for step in sorted(by_step)]


def _latest(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A step that was taken again, after the run went on from a checkpoint: as it was the last time."""
    attempt = max(part.get("attempt", 0) for part in parts)
    return [part for part in parts if part.get("attempt", 0) == attempt]


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {"step": parts[0]["step"]}
    samples = sum(part["samples"] for part in parts)
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part[key] for part in parts if part.get(key) is not None]
        if not values:
            joined[key] = None
        elif key == "step_s":
            joined[key] = statistics.mean(values)  # who waits in one step is early in the next: the mean keeps the pace
        elif key.endswith("_s"):
            joined[key] = max(values)
        elif key in ("wire_bytes", "samples"):
            joined[key] = sum(values)
        elif key != "step":
            known = [(part["samples"] or 1, part[key]) for part in parts if isinstance(part.get(key), (int, float))]
            weight = sum(w for w, _ in known)
            joined[key] = sum(w * v for w, v in known) / weight if known else values[-1]
    return joined | {"samples": samples}


def summary(folder: Path) -> dict[str, Any]:
    """The run in one object, as `weft train --json` gives it; the first steps are warm-up and left out of times."""
    environment, steps = read_json(folder, "environment.json"), events(folder)
    if not steps:
        raise UserError(f"{folder} holds no step; the run ended before its first")
    with _understood(folder):
        row = _row(folder, environment, steps)
    if (folder / "report.json").exists():
        row["report"] = read_json(folder, "report.json")
    if found := servers(folder):
        row["servers"] = found
    return row


def servers(folder: Path) -> list[dict[str, Any]]:
    """What each parameter server has seen (`tally`), if there were any."""
    with _understood(folder):
        rows = [_a(dict, read_json(folder, file.name)) for file in folder.glob("server-*.json")]
        return sorted(rows, key=lambda row: _a(int, row["server"]))


def asynchrony(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All servers' tallies in a few figures: how late gradients were, and who has waited most for whom."""
    late = Counter[int]()
    waits = Counter[tuple[int, int]]()
    for row in rows:
        for _, staleness, count in row["staleness"]:
            late[staleness] += count
        for who, on, seconds in row["waits"]:
            waits[who, on] = max(waits[who, on], seconds)  # servers are waited for at the same time
    most = max(waits, key=lambda pair: waits[pair], default=None)
    return {
        "staleness_mean": sum(k * n for k, n in late.items()) / late.total() if late else None,
        "staleness_most": max(late, default=None),
        "queue_most": max((row["queue_most"] or 0 for row in rows), default=None),
        "server_bytes": max((row["received_bytes"] + row["sent_bytes"] for row in rows), default=None),
        "longest_wait": [*most, waits[most]] if most is not None else None,
    }


def by_period(values: Sequence[float], period: int) -> list[float]:
    """Means over whole periods, where steps differ by what is due in them."""
    whole = len(values) // period
    return [statistics.mean(values[i * period : (i + 1) * period]) for i in range(whole)] or [statistics.mean(values)]


def _row(folder: Path, environment: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    period = _a(int, environment.get("period", 1))
    times = by_period([event["step_s"] for event in steps[min(5, len(steps) // 2) :]], period)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    samples = statistics.median(event["samples"] for event in steps)
    step_s = statistics.median(times)
    return {
        "strategy": environment["strategy"],
        "workers": environment["workers"],
        "steps": len(steps),
        "step_s": step_s,
        "step_s_spread": quartiles[2] - quartiles[0],
        "samples_per_s": samples / step_s,
        "wire_bytes_worker": statistics.median(by_period([e["wire_bytes"] for e in steps], period))
        / environment["workers"],
        "final_loss": steps[-1].get("loss"),
        "folder": str(folder),
    }
