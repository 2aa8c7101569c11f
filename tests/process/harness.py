"""Several processes as one run, started from a fork server that has imported everything already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.strategy import Strategy
from weft.transport.messaging import Key

TIMEOUT_S = 120
PRELOADED = [
    "torch",
    "weft",
    "weft.runtime.run",
    "torch.distributed",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
]

Child = multiprocessing.context.ForkServerProcess


def spawn(
    processes: int, function: Callable[..., Any], *args: Any, workers: int | None = None, **env: str
) -> list[Any]:
    """Call a module-level function in each process of a run; returns what each returned, in the order of processes.

    `env` are environment variables, as `WEFT_STRATEGY="bsp / ring"`. Raises what the first failing process raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = start(Path(folder), processes, function, *args, workers=workers, **env)
        for child, _ in children:
            child.join(TIMEOUT_S)
        hung = [child for child, _ in children if child.is_alive()]
        for child in hung:
            child.kill()
            child.join()
        outcomes = [pickle.loads(answer.read_bytes()) if answer.exists() else None for _, answer in children]
    errors = [outcome for outcome in outcomes if outcome is not None and outcome[0] != "value"]
    first = next((e for e in errors if e[0] != "PeerLost"), errors[0] if errors else None)
    if first is not None:
        raise ChildError(first[0], first[1])
    if hung or None in outcomes:
        raise ChildError("Hang" if hung else "Death", f"{len(hung)} of {processes} processes had to be killed")
    return [outcome[1] for outcome in outcomes[:processes] if outcome is not None]


def start(
    folder: Path, processes: int, function: Callable[..., Any], *args: Any, workers: int | None = None, **env: str
) -> list[tuple[Child, Path]]:
    """Start the processes of a run, servers last; each leaves what it returned or raised in the file beside it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    children = []
    servers = _servers(env.get("WEFT_STRATEGY", ""), workers or processes)
    Key.make(folder / "key")
    for process in range(processes + servers):
        place = {"RANK": str(process), "LOCAL_RANK": str(process), "WORLD_SIZE": str(processes)}
        place |= {"WEFT_WORKERS": str(workers or processes), "WEFT_STORE": f"{folder}/store", **env}
        place |= {"WEFT_TIMEOUT_S": "60", "WEFT_KEY_FILE": f"{folder}/key", "WEFT_MEETING": str(folder)}
        place |= {"LOCAL_WORLD_SIZE": str(processes)}
        if process >= processes:
            place["WEFT_SERVER"] = str(process - processes)
        answer = folder / f"answer-{process}"
        children.append((context.Process(target=_child, args=(place, answer, function, args)), answer))
    for child, _ in children:
        child.start()
    return children


def _servers(strategy: str, workers: int) -> int:
    """How many servers go with a strategy."""
    return len(Strategy.parse(strategy).server_hosts(workers)) if strategy else 0


class ChildError(Exception):
    """A process of the run failed: `kind` is the exception's class name, the text its traceback."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def _child(env: dict[str, str], answer: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    os.environ.update(env)
    torch.set_num_threads(1)
    try:
        outcome: Any = ("value", function(*args))
    except SystemExit as left:
        outcome = ("value", None) if not left.code else ("SystemExit", traceback.format_exc())
    except BaseException as error:
        outcome = (type(error).__name__, traceback.format_exc())
    scratch = answer.with_suffix(".part")
    scratch.write_bytes(pickle.dumps(outcome))
    scratch.rename(answer)
    os._exit(0)
