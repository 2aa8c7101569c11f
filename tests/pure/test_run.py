"""What a process without workers answers to the methods of a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import weft
from weft.errors import LoopError
from weft.runtime.launch.world import World
from weft.runtime.server.process import ServerRun
from weft.strategy import Strategy

FOR_WORKERS: dict[str, Callable[[weft.Run], object]] = {
    "passes": lambda run: run.passes,
    "shard": lambda run: run.shard([]),
    "log": lambda run: run.log(loss=0.0),
    "accumulate": lambda run: run.accumulate(),
    "clip": lambda run: run.clip(1.0),
    "report": lambda run: run.report(accuracy=1.0),
    "save": lambda run: run.save(),
}


def server_run() -> weft.Run:
    strategy = Strategy.parse("bsp / parameter_server(servers=1)")
    return weft.Run(ServerRun(world=World(process=2, workers=2, server=0), strategy=strategy, steps=3, seed=5))


@pytest.mark.parametrize("name", FOR_WORKERS)
def test_methods_for_workers_are_refused_on_a_server(name: str) -> None:
    with pytest.raises(LoopError, match=f"^run.{name} was used before run.distribute"):
        FOR_WORKERS[name](server_run())


def test_a_script_reads_the_same_attributes_on_a_server() -> None:
    run = server_run()
    assert (run.rank, run.workers, run.step, run.is_main) == (0, 2, 0, False)
    assert (run.seed, run.steps, run.folder, run.device) == (5, 3, None, torch.device("cpu"))
    run.close()
