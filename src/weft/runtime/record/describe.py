"""What a run is and how it was started, written to its folder and read back for a resume."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import weft
from weft import jobs
from weft.environment import LabOptions, RunOptions
from weft.errors import UserError
from weft.lazy import torch
from weft.ops import Spec
from weft.runtime.launch.spec import Launch
from weft.runtime.record.events import Recorder, progress_pipe
from weft.runtime.record.files import write_json, write_text, writing
from weft.runtime.record.run_folder import read_json, typed
from weft.store.checkpoint import Policy
from weft.strategy import Strategy

if TYPE_CHECKING:
    from weft.runtime.launch.world import World
    from weft.runtime.record.clock import Clock


def open_recorder(
    folder: Path | None, strategy: Strategy, world: World, clock: Clock, seed: int, steps: int | None
) -> Recorder | None:
    """The recorder of this process, where there is a run folder or a launcher that shows progress."""
    main = world.process == 0
    tell = progress_pipe() if main else None
    if folder is None and tell is None:
        return None
    recorder = Recorder(folder, world.process, clock, tell, trace=RunOptions.from_env().trace)
    recorder.about = {"steps": steps, "workers": world.processes}
    recorder.marks = set(LabOptions.from_env().marks or ())
    if folder is not None and main:
        describe(folder, strategy, world, clock.device, seed, steps)
    return recorder


def describe(
    folder: Path, strategy: Strategy, world: World, device: torch.device, seed: int, steps: int | None
) -> None:
    """Write the strategy and the environment of the run."""
    write_text(folder / "strategy.toml", f"# {strategy}\n{strategy.to_toml()}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    environment = {
        "strategy": str(strategy),
        "period": strategy.optimization.period,
        "merges_models": strategy.merges_models,
        "peer": LabOptions.from_env().peer,
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


def describe_launch(folder: Path, spec: Launch, *, finished: bool = False) -> None:
    """Write the options of the launch, so that the run can be resumed, and whether it has reached its end."""
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
        "finished": finished,
    }
    write_json(folder / _LAUNCH, word)


def has_finished(folder: Path) -> bool:
    """Whether a run has reached its end."""
    word = read_json(folder, _LAUNCH)
    return isinstance(word, dict) and word.get("finished") is True


def launched(folder: Path) -> Launch:
    """The options with which a run was launched."""
    word = read_json(folder, _LAUNCH)
    try:
        policy = word["policy"]
        return Launch(
            job=typed(str, word["job"]),
            args=tuple(typed(str, each) for each in word["args"]),
            workers=typed(int, word["workers"]),
            processes=typed(int | None, word["processes"]),
            strategy=Strategy.parse(word["strategy"]) if word["strategy"] is not None else None,
            steps=typed(int | None, word["steps"]),
            seed=typed(int | None, word["seed"]),
            device=typed(str, word["device"]),
            share_gpus=typed(bool, word["share_gpus"]),
            policy=Policy(every=policy[0], last=policy[1], milestone=policy[2]) if policy else None,
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"{folder / _LAUNCH} cannot be parsed: {error}; give a folder made by `weft train`") from None


def describe_model(folder: Path, specs: Sequence[Spec]) -> None:
    """Write the names, shapes and dtypes of the trained parameters."""
    write_json(folder / "model.json", [[spec.name, list(spec.shape), str(spec.dtype)[6:]] for spec in specs])
