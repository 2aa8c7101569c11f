"""The two grounds of a loop, plain PyTorch on the joined batch and a weft run, and processes that run loops on them."""

from __future__ import annotations

import abc
import contextlib
import itertools
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weft
from tests.process.harness import Child, spawn, start

HANG_S = 120
GRACE_S = 1.0
"""How long the other processes have to say what they saw, once one has failed."""


class Ground(abc.ABC):
    """What a loop asks of a run."""

    plain: bool
    workers: int
    turns = 1
    """How many workers this process carries: so many batches make one step."""

    def step_of(self, index: int) -> int:
        """The step that a shard's batch belongs to."""
        return index // self.turns

    def ends_step(self, index: int) -> bool:
        """Whether it is the step's last batch in this process."""
        return index % self.turns == self.turns - 1

    @abc.abstractmethod
    def distribute(self, model: Any, optimizer: Any, *followers: Any, **options: Any) -> Any: ...

    @abc.abstractmethod
    def shard(self, loader: Iterable[Any], **options: Any) -> Iterable[Any]: ...

    @abc.abstractmethod
    def accumulate(self) -> contextlib.AbstractContextManager[None]: ...


class Plain(Ground):
    """One process without weft, on the joined batches of so many workers."""

    plain = True

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def distribute(self, model: Any, optimizer: Any, *followers: Any, **options: Any) -> Any:
        return (model, optimizer, *followers)

    def shard(self, loader: Iterable[Any], **options: Any) -> Iterable[Any]:
        batches = iter(loader)
        while group := list(itertools.islice(batches, self.workers)):
            yield joined(group)

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Distributed(Ground):
    """A run of weft."""

    plain = False

    def __init__(self, run: weft.Run) -> None:
        self.run, self.workers = run, run.workers
        self.turns = run.workers // int(os.environ["WORLD_SIZE"])

    def distribute(self, model: Any, optimizer: Any, *followers: Any, **options: Any) -> Any:
        return self.run.distribute(model, optimizer, *followers, **options)

    def shard(self, loader: Iterable[Any], **options: Any) -> Iterable[Any]:
        return self.run.shard(loader, **options)

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return self.run.accumulate()


def joined(group: Sequence[Any]) -> Any:
    """Several batches as one, whatever they are nested in."""
    first = group[0]
    if isinstance(first, Tensor):
        return torch.cat(list(group))
    if isinstance(first, dict):
        return {key: joined([batch[key] for batch in group]) for key in first}
    return type(first)(joined(parts) for parts in zip(*group, strict=True))


Loop = Callable[[Ground], dict[str, Tensor]]


@dataclass(frozen=True)
class Failure:
    """What a process raised; or `Hang` or `Death`, where it told nothing."""

    kind: str
    message: str
    trace: str = ""


Outcome = dict[str, Tensor] | Failure | None
"""What a loop left in one process; None in a server."""


def references(loops: Sequence[Loop], workers: int) -> list[dict[str, Tensor]]:
    """Each loop on plain PyTorch, in a process of its own."""
    (found,) = spawn(1, _references, loops, workers)
    return found


def _references(loops: Sequence[Loop], workers: int) -> list[dict[str, Tensor]]:
    torch.set_default_dtype(torch.float64)
    return [loop(Plain(workers)) for loop in loops]


def run_each(
    loops: Sequence[Loop], strategy: str, *, workers: int, processes: int
) -> Iterator[list[dict[str, Tensor]] | Failure]:
    """Each loop's outcome under weft: one state for each process, or the first failure.

    Loops run one after another in the same processes. After a failure, fresh processes take up the rest.
    """
    left = list(loops)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            started = start(
                Path(folder),
                processes,
                _run_all,
                left,
                folder,
                workers=workers,
                WEFT_STRATEGY=strategy,
                WEFT_SAVE_EVERY="0",
            )
            children = [child for child, _ in started]
            try:
                while left:
                    outcome = _wait(children, _folder(folder, len(left)))
                    left.pop(0)
                    if isinstance(outcome, Failure):
                        yield outcome
                        break
                    yield [each for each in outcome[:processes] if each is not None]
            finally:
                for child in children:
                    if left and child.is_alive():
                        child.kill()
                    child.join(GRACE_S)
                    child.kill()
                    child.join()


def _folder(folder: str, left: int) -> Path:
    """Where processes meet and leave their outcomes while so many loops are left."""
    return Path(folder) / str(left)


def _run_all(loops: Sequence[Loop], folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    for at, loop in enumerate(loops):
        place = _folder(folder, len(loops) - at)
        place.mkdir(exist_ok=True)
        os.environ |= {"WEFT_STORE": f"{place}/store", "WEFT_MEETING": str(place)}
        outcome = _run(loop)
        scratch = place / f"part-{os.getpid()}"
        scratch.write_bytes(pickle.dumps(outcome))
        scratch.rename(place / f"outcome-{os.environ['RANK']}")
        if isinstance(outcome, Failure):
            return


def _run(loop: Loop) -> Outcome:
    """One run from init to close; a server leaves init by SystemExit."""
    try:
        run = weft.init()
        outcome = {name: tensor.detach().clone() for name, tensor in loop(Distributed(run)).items()}
        run.close()
        return outcome
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return None
        return Failure(type(error).__name__, str(error), traceback.format_exc())


def _wait(children: Sequence[Child], place: Path) -> list[Outcome] | Failure:
    """The outcome of every process, or the failure that came first."""
    outcomes: dict[int, Outcome] = {}
    until = time.monotonic() + HANG_S
    failed = False
    while len(outcomes) < len(children) and time.monotonic() < until:
        alive = any(child.is_alive() for child in children)
        for rank in range(len(children)):
            path = place / f"outcome-{rank}"
            if rank not in outcomes and path.exists():
                outcomes[rank] = pickle.loads(path.read_bytes())
        if not failed and any(isinstance(each, Failure) for each in outcomes.values()):
            failed, until = True, time.monotonic() + GRACE_S
        if not alive:
            break
        time.sleep(0.01)
    failures = [each for each in outcomes.values() if isinstance(each, Failure)]
    if failures:
        return next((each for each in failures if each.kind != "PeerLost"), failures[0])
    if len(outcomes) < len(children):
        codes = [child.exitcode for child in children]
        return Failure("Hang" if any(child.is_alive() for child in children) else "Death", f"exit codes {codes}")
    return [outcomes[rank] for rank in range(len(children))]
