"""Kept processes: runs have the bits of runs in new ones, and a process that cannot be restored is replaced."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import weft
from tests.process.harness import ChildError, spawn
from tests.process.pool import HANG, Pool
from tests.process.replicas import batches, digest, model_with_dice
from tests.process.training import fit, regression
from weft.axis import catalogue
from weft.compression import _coded
from weft.runtime import run as runs
from weft.runtime.checks import replicas

STRATEGIES = {
    "all-reduce": "bsp / direct / error_feedback(topk(ratio=0.1)) / fused(bucket=1KiB, first=100B)",
    "servers": "bsp / parameter_server(servers=2) / int8 / priority",
    "aggregators": "ssp(slack=0) / hierarchical(groups=2)",
}


def learn() -> tuple[list[float], str]:
    """Losses and a hash of the last state; dropout and the data's order are drawn from random numbers."""
    run = weft.init(steps=4)
    model = model_with_dice()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = run.distribute(model, optimizer)
    losses = fit(model, optimizer, run.shard(batches(4)), regression)
    run.close()
    return losses, digest(model.state_dict())


def disturb() -> None:
    """Change what a run reads: random numbers, defaults, constants, the environment, signals and warnings."""
    torch.manual_seed(99)
    numpy.random.seed(99)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    _coded.A_ROUND, replicas.HASH_EVERY = 1, 1
    os.environ["WEFT_SEED"] = "99"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    os.chdir("/")


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_run_has_the_bits_of_a_run_in_new_processes(pool: Pool, strategy: str) -> None:
    new = spawn(2, learn, fresh=True, WEFT_STRATEGY=strategy)
    assert spawn(2, learn, WEFT_STRATEGY="bsp / ring", WEFT_SEED="5") != new
    spawn(7, disturb)
    before = pool.pids
    for _ in range(2):
        assert spawn(2, learn, WEFT_STRATEGY=strategy) == new
    assert pool.pids == before and len(before) >= 7  # none was replaced in between


def state() -> dict[str, Any]:
    return {
        "env": {name for name in os.environ if name.startswith("WEFT_")},
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "drawn": (torch.rand(3).tolist(), numpy.random.rand()),  # a fork seeds Python's own generator anew
        "constants": (_coded.A_ROUND, replicas.HASH_EVERY),
        "signal": signal.getsignal(signal.SIGTERM),
        "warnings": [each[0] for each in warnings.filters],
        "folder": os.getcwd(),
        "joined": runs.joined,
    }


def test_the_state_of_a_process_is_restored() -> None:
    (new,) = spawn(1, state, fresh=True)
    spawn(1, learn)
    spawn(1, disturb)
    assert spawn(1, state) == [new]


ANSWER = """
from weft.schedule import Schedule
from weft.schedule._wave import wave

class Named(Schedule):
    \"\"\"{word}\"\"\"

    def timetable(self, specs, rounds, seen=None):
        return wave([[spec] for spec in specs], rounds)
"""


def own_answer() -> str | None:
    return catalogue("schedule")["named"].__doc__


def test_answers_from_a_folder_are_those_of_the_run(tmp_path: Path) -> None:
    """Two folders with an answer of one name."""
    for word in ("one", "other"):
        (tmp_path / word / "schedule").mkdir(parents=True)
        (tmp_path / word / "schedule/named.py").write_text(ANSWER.format(word=word))
        assert spawn(1, own_answer, WEFT_PATH=str(tmp_path / word)) == [word]
    with pytest.raises(ChildError, match="KeyError: 'named'"):
        spawn(1, own_answer)


def raises() -> None:
    raise ValueError("on purpose")


def leaves_a_run_open() -> int:
    weft.init()
    return os.getpid()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(code: int) -> None:
    raise SystemExit(code)


@pytest.mark.parametrize(("function", "kind"), [(raises, "ValueError"), (killed, "Death")])
def test_a_process_that_failed_is_replaced(pool: Pool, function: Any, kind: str) -> None:
    spawn(1, os.getpid)
    before = pool.pids
    with pytest.raises(ChildError) as caught:
        spawn(1, function)
    assert caught.value.kind == kind
    assert len(before - pool.pids) == 1


def test_a_process_that_left_a_run_open_is_replaced(pool: Pool) -> None:
    (pid,) = spawn(1, leaves_a_run_open)
    assert pid not in pool.pids


def test_a_process_that_hangs_is_replaced() -> None:
    own = Pool()
    try:
        assert own.run([{}], time.sleep, (60,), 0.5) == [HANG]
        assert not own.pids
        assert own.run([{}], abs, (-1,), 30) == [("value", 1)]
    finally:
        own.close()


def test_the_end_of_a_server_is_the_end_of_its_function(pool: Pool) -> None:
    spawn(1, os.getpid)
    before = pool.pids
    assert spawn(1, leaves, 0) == [None]
    assert pool.pids == before
    with pytest.raises(ChildError) as caught:
        spawn(1, leaves, 3)
    assert caught.value.kind == "SystemExit"


def test_new_processes_are_not_kept(pool: Pool) -> None:
    (pid,) = spawn(1, os.getpid, fresh=True)
    assert pid not in pool.pids
