"""Several processes as one run: kept ones, or new ones from a fork server that has imported everything already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.process.pool import DEATH, HANG, KEPT, READ_ONCE, Outcome, fork_server, outcome_of
from weft.strategy import Strategy
from weft.transport.messaging import Key

TIMEOUT_S = 120

Child = multiprocessing.context.ForkServerProcess


def spawn(
    processes: int,
    function: Callable[..., Any],
    *args: Any,
    workers: int | None = None,
    fresh: bool = False,
    **env: str,
) -> list[Any]:
    """Call a module-level function in each process of a run; returns what each returned, in the order of processes.

    `env` are environment variables, as `WEFT_STRATEGY="bsp / ring"`. Raises what the first failing process raised.
    Processes are kept for the next run. `fresh=True` starts new ones: for functions that kill or signal processes, that
    change what a process cannot restore, or that are about the start or the end of a process.
    """
    with tempfile.TemporaryDirectory() as folder:
        if fresh or any(name in env for name in READ_ONCE):
            outcomes = _in_new_processes(Path(folder), processes, function, args, workers, env)
        else:
            outcomes = KEPT.run(environments(Path(folder), processes, workers, env), function, args, TIMEOUT_S)
    silent = [outcome for outcome in outcomes if outcome in (HANG, DEATH)]
    errors = [outcome for outcome in outcomes if outcome[0] != "value" and outcome not in silent]
    first = next((e for e in errors if e[0] != "PeerLost"), errors[0] if errors else None)
    if first is not None:
        raise ChildError(first[0], first[1])
    if silent:
        kind = HANG[0] if HANG in silent else DEATH[0]
        raise ChildError(kind, f"{len(silent)} of {processes} processes gave no answer")
    return [outcome[1] for outcome in outcomes[:processes]]


def _in_new_processes(
    folder: Path,
    processes: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    workers: int | None,
    env: dict[str, str],
) -> list[Outcome]:
    children = start(folder, processes, function, *args, workers=workers, **env)
    for child, _ in children:
        child.join(TIMEOUT_S)
    hung = [child for child, _ in children if child.is_alive()]
    for child in hung:
        child.kill()
        child.join()
    missing = [HANG if child in hung else DEATH for child, _ in children]
    answers = [answer for _, answer in children]
    return [
        pickle.loads(answer.read_bytes()) if answer.exists() else none
        for answer, none in zip(answers, missing, strict=True)
    ]


def start(
    folder: Path, processes: int, function: Callable[..., Any], *args: Any, workers: int | None = None, **env: str
) -> list[tuple[Child, Path]]:
    """Start new processes for a run, servers last; each leaves what it returned or raised in the file beside it."""
    context = fork_server()
    children = []
    for process, place in enumerate(environments(folder, processes, workers, env)):
        answer = folder / f"answer-{process}"
        children.append((context.Process(target=_child, args=(place, answer, function, args)), answer))
    for child, _ in children:
        child.start()
    return children


def environments(folder: Path, processes: int, workers: int | None, env: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment variables of each process of a run, servers last."""
    Key.make(folder / "key")
    workers = workers or processes
    common = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "WEFT_WORKERS": str(workers)}
    common |= {"WEFT_STORE": f"{folder}/store", **env}
    common |= {"WEFT_TIMEOUT_S": "60", "WEFT_KEY_FILE": f"{folder}/key", "WEFT_MEETING": str(folder)}
    places = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    for server in range(_servers(env.get("WEFT_STRATEGY", ""), workers)):
        rank = str(processes + server)
        places.append(common | {"RANK": rank, "LOCAL_RANK": rank, "WEFT_SERVER": str(server)})
    return places


def _servers(strategy: str, workers: int) -> int:
    """The number of servers that a strategy has."""
    return len(Strategy.parse(strategy).server_hosts(workers)) if strategy else 0


class ChildError(Exception):
    """A process of the run failed: `kind` is the exception's class name, the text its traceback."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def _child(env: dict[str, str], answer: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    outcome = outcome_of(function, args)
    scratch = answer.with_suffix(".part")
    scratch.write_bytes(pickle.dumps(outcome))
    scratch.rename(answer)
    os._exit(0)
