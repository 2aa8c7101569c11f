"""The run folder, the only interface between a run and whatever looks at it: what is in it, and what it says."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import weft
from weft.errors import UserError
from weft.ops import Spec
from weft.runtime.record import write_json, writing
from weft.runtime.world import World
from weft.strategy import Strategy


def describe(
    folder: Path, strategy: Strategy, world: World, device: torch.device, seed: int, steps: int | None
) -> None:
    """Write what the run is and where it runs."""
    with writing(folder):
        (folder / "strategy.toml").write_text(f"# {strategy}\n{strategy.to_toml()}", encoding="utf-8")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    environment = {
        "strategy": str(strategy),
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


def describe_model(folder: Path, specs: Sequence[Spec]) -> None:
    """Write what trains: the parameters' names, shapes and dtypes."""
    write_json(folder / "model.json", [[spec.name, list(spec.shape), str(spec.dtype)[6:]] for spec in specs])


def model(folder: Path) -> list[Spec]:
    """The parameters that train, in the model's order."""
    rows = read_json(folder, "model.json")
    return [Spec(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in rows]


def read_json(folder: Path, name: str) -> Any:
    """A JSON file of a run folder, or an error that says what is wrong with the folder."""
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} has no {name}, so it is not a run folder; give one that `weft train` made") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / name} cannot be read: {error}") from None


def events(folder: Path) -> list[dict[str, Any]]:
    """One event per step, over all processes: the mean step time, other times of the slowest, values by samples."""
    read_json(folder, "environment.json")
    by_step: dict[int, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("events-*.jsonl")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                event = json.loads(line)
                by_step.setdefault(event["step"], []).append(event | {"samples": event["samples"]})
            except (ValueError, TypeError, KeyError):
                continue  # the last line of a process that was killed
    return [_joined(by_step[step]) for step in sorted(by_step)]


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
    times = [event["step_s"] for event in steps[min(5, len(steps) // 2) :]]
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    samples = statistics.median(event["samples"] for event in steps)
    step_s = statistics.median(times)
    row = {
        "strategy": environment["strategy"],
        "workers": environment["workers"],
        "steps": len(steps),
        "step_s": step_s,
        "step_s_spread": quartiles[2] - quartiles[0],
        "samples_per_s": samples / step_s,
        "wire_bytes_worker": statistics.median(e["wire_bytes"] for e in steps) / environment["workers"],
        "final_loss": steps[-1].get("loss"),
        "folder": str(folder),
    }
    if (folder / "report.json").exists():
        row["report"] = read_json(folder, "report.json")
    return row
