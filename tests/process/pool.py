"""Processes that are kept from one run to the next.

Most of the time of a short run is the start of its processes: a fork, the import of the test's module, and the first
use of each library. A kept process pays for them once. After every run its state is restored to the state before its
first run, so that a run gives the same bits as in a new process. A process that cannot be restored is replaced: its
function raised, or left a run or a process group open, or it was killed, or it hung.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft import axis, kernels
from weft.runtime import run as runs

ROOT = Path(__file__).parents[2]
MAX_RUNS = 100
"""A kept process is replaced after this many calls: each engine leaves a thread that waits for ever."""
GRACE_S = 0.2
SERVER_GRACE_S = 5.0
"""How long servers may outlive workers that have all failed: outside of a launcher nobody ends them."""
READ_ONCE = ("WEFT_PEER_TIMEOUT_S", "WEFT_SANITIZE")
"""Variables that a process reads once, at its first use of a library; a run that sets one has processes of its own."""

Outcome = tuple[str, Any]
"""`("value", returned)`, or the name of an exception's class and its traceback."""
DEATH: Outcome = ("Death", "the process ended without an answer")
HANG: Outcome = ("Hang", "the process had to be killed")

_WITHOUT = ("cli", "lab", "jobs", "__main__", "kernels/cuda")


def preloaded() -> list[str]:
    """Modules that the fork server imports: torch, and every module of weft that a run may use."""
    heavy = ["torch", "torch.distributed", "torch._dynamo", "torch._functorch.aot_autograd", "numpy", "pytest"]
    home = Path(weft.__file__).parent
    files = sorted(str(file.relative_to(home).with_suffix("")) for file in home.rglob("*.py"))
    own = [file.removesuffix("/__init__").replace("/", ".") for file in files if not file.startswith(_WITHOUT)]
    return [*heavy, "weft", *(f"weft.{name}" for name in own if not name.endswith("__"))]


def fork_server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded())
    return context


def outcome_of(function: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
    """Call a function; the end of a server's process by SystemExit(0) is the value None."""
    try:
        return "value", function(*args)
    except SystemExit as left:
        return ("value", None) if not left.code else ("SystemExit", traceback.format_exc())
    except BaseException as error:
        return type(error).__name__, traceback.format_exc()


# --- the side of the tests --------------------------------------------------------------------------------------------


class Pool:
    """Kept processes, as many as the largest run so far."""

    def __init__(self) -> None:
        self._idle: list[_Member] = []

    def run(
        self,
        environments: Sequence[Mapping[str, str]],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        timeout_s: float,
    ) -> list[Outcome]:
        """Call the function once in each environment, at the same time; the outcomes in the order of environments."""
        members = [self._take() for _ in environments]
        call = pickle.dumps((function, args))
        for member, env in zip(members, environments, strict=True):
            member.send(env, call)
        until = time.monotonic() + timeout_s
        outcomes: list[Outcome | None] = []
        for member, env in zip(members, environments, strict=True):
            if "WEFT_SERVER" in env and all(outcome is None or outcome[0] != "value" for outcome in outcomes):
                until = min(
                    until, time.monotonic() + SERVER_GRACE_S
                )  # every worker has failed, perhaps before it joined
            outcomes.append(member.outcome(until))
        for member, outcome in zip(members, outcomes, strict=True):
            if outcome is None:
                member.end()
        self._idle += [member for member in members if member.kept]
        return [HANG if outcome is None else outcome for outcome in outcomes]

    @property
    def pids(self) -> set[int]:
        """The processes that wait for a run."""
        return {member.pid for member in self._idle}

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def _take(self) -> _Member:
        with contextlib.suppress(IndexError):
            while not (member := self._idle.pop()).alive:
                member.end()
            return member
        return _Member()


class _Member:
    """One kept process, and the link to it."""

    def __init__(self) -> None:
        context = fork_server()
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        self.kept = True

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def send(self, env: Mapping[str, str], call: bytes) -> None:
        self._link.send_bytes(pickle.dumps((dict(env), os.getcwd(), sys.path, call)))

    def outcome(self, until: float) -> Outcome | None:
        """None where there is no answer in time."""
        if not connection.wait([self._link, self._process.sentinel], max(0.0, until - time.monotonic())):
            return None
        try:
            if not self._link.poll():
                raise EOFError
            answer, self.kept = pickle.loads(self._link.recv_bytes())
            outcome: Outcome = pickle.loads(answer)
        except (EOFError, ConnectionResetError):
            outcome, self.kept = DEATH, False
        if not self.kept:
            self._leave()
        return outcome

    def end(self) -> None:
        """Kill the process, whatever it does."""
        self.kept = False
        self._process.kill()
        self._leave()

    def _leave(self) -> None:
        self._link.close()
        self._process.join()


# --- the side of the kept process -------------------------------------------------------------------------------------


def _serve(link: connection.Connection) -> None:
    """Perform calls until the other side of the link is closed."""
    os.chdir(ROOT)
    torch.set_num_threads(1)
    before = Before()
    for number in range(1, MAX_RUNS + 1):
        try:
            env, folder, path, call = pickle.loads(link.recv_bytes())
        except EOFError:
            os._exit(0)
        os.environ.update(env)
        os.chdir(folder)
        sys.path[:] = path
        done, answer = _perform(call, before)  # the answer is bytes: it may hold lists that are restored
        kept = done and number < MAX_RUNS and left_nothing()
        if kept:
            before.restore()
        link.send_bytes(pickle.dumps((answer, kept)))
        if not kept:
            os._exit(0)


def _perform(call: bytes, before: Before) -> tuple[bool, bytes]:
    """Whether the call returned, and its outcome."""

    def perform() -> Any:
        function, args = pickle.loads(call)
        before.look()  # at the modules which this call has imported
        return function(*args)

    outcome = outcome_of(perform, ())
    try:
        return outcome[0] == "value", pickle.dumps(outcome)
    except Exception as error:
        return False, pickle.dumps((type(error).__name__, traceback.format_exc()))


def left_nothing() -> bool:
    """Whether a function has closed what it opened."""
    if runs._current is not None or dist.is_initialized() or torch.cuda.is_initialized():
        return False
    gc.collect()  # a loader's processes end with its iterator
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    others = [thread for thread in others if thread.name not in ("weft-engine", "weft-heart")]
    until = time.monotonic() + GRACE_S  # a server's door notices a little later that it is closed
    for thread in others:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in others) and not multiprocessing.active_children()


class Before:
    """The state of a process before its first run."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # later collections then look only at the objects of a run
        self._env, self._argv = dict(os.environ), list(sys.argv)
        self._random = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        self._warnings = list(warnings.filters)
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._modules: dict[str, _Names] = {}
        self._loggers = {logger: (logger.level, logger.handlers[:]) for logger in _loggers()}
        self.look()

    def look(self) -> None:
        """Remember the modules that are new."""
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in ("weft", "tests") and name not in self._modules:
                self._modules[name] = _Names(module)

    def restore(self) -> None:
        """Bring the state back."""
        self._forget_answers()
        for names in self._modules.values():
            names.restore()
        if "data" in vars(nn.Parameter):  # workers of servers count edits through it
            del nn.Parameter.data
        for logger in _loggers():
            level, handlers = self._loggers.get(logger, (logging.NOTSET, []))
            logger.setLevel(level)
            logger.handlers[:] = handlers
        for number, handler in self._signals.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        warnings.filters[:] = self._warnings
        warnings._filters_mutated()  # type: ignore[attr-defined]  # what was shown once may be shown again
        sys.argv[:] = self._argv
        os.environ.clear()
        os.environ.update(self._env)
        os.chdir(ROOT)
        _restore_torch()
        random.setstate(self._random[0])
        numpy.random.set_state(self._random[1])
        torch.set_rng_state(self._random[2])

    def _forget_answers(self) -> None:
        """Modules from WEFT_PATH have names within weft, and another folder may hold others with the same names."""
        home = str(Path(weft.__file__).parent)
        for name, module in list(sys.modules.items()):
            if name.startswith("weft.") and not str(getattr(module, "__file__", None) or home).startswith(home):
                del sys.modules[name]
                self._modules.pop(name, None)
        axis._discover.cache_clear()
        kernels._on.cache_clear()


class _Names:
    """The names of a module and of its classes, and the contents of its containers."""

    def __init__(self, module: ModuleType) -> None:
        kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
        owners = [module, *(kind for kind in kinds if kind.__module__ == module.__name__)]
        self._owners = [(owner, dict(vars(owner))) for owner in owners]
        held = [value for owner in owners for name, value in vars(owner).items() if not name.startswith("__")]
        self._contents = [(value, value.copy()) for value in held if type(value) in (dict, list, set)]

    def restore(self) -> None:
        for owner, names in self._owners:
            now = vars(owner)
            for name, value in names.items():
                if now.get(name, self) is not value:
                    with contextlib.suppress(AttributeError, TypeError):  # what an interpreter keeps there itself
                        setattr(owner, name, value)
        for value, content in self._contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)


def _loggers() -> list[logging.Logger]:
    named = logging.Logger.manager.loggerDict
    own = [logger for name, logger in named.items() if name.startswith("weft") and isinstance(logger, logging.Logger)]
    return [logging.getLogger(), *own]


def _restore_torch() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    if torch._dynamo.utils.counters:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


KEPT = Pool()
"""The pool of this session of tests; it starts no process before the first run."""
atexit.register(KEPT.close)
