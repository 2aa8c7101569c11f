"""What goes wrong, where and when: `Faults().kill(rank=1, at_step=7).slow(rank=3, by_s=0.01)`.

A plan travels to a run's processes in the environment, and a job attaches it to itself. Steps count from 1; a point
within the step is where the fault strikes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

POINTS = ("forward", "backward", "step", "after")
MERGE = "merge"
"""Of local optimizers alone: while the differences of their models are exchanged."""
TOUCHING = "openat,mkdir,mkdirat,write,pwrite64,fsync,fdatasync,close,rename,renameat,renameat2,unlink,unlinkat,rmdir"
"""System calls that can change a folder, or what is known of it on the disk."""


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: int
    step: int
    point: str = "forward"
    seconds: float = 0.0
    path: str = ""

    def strike(self) -> None:
        match self.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "stop":
                wake = ["sh", "-c", f"sleep {self.seconds}; kill -CONT {os.getpid()}"]
                subprocess.Popen(wake, start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                time.sleep(self.seconds)
            case "full_disk":
                fill(Path(self.path))


@dataclass(frozen=True)
class Faults:
    plan: tuple[Fault, ...] = ()

    def kill(self, *, rank: int, at_step: int, point: str = "forward") -> Faults:
        return self._and(Fault("kill", rank, at_step, point))

    def terminate(self, *, rank: int, at_step: int) -> Faults:
        """SIGTERM."""
        return self._and(Fault("terminate", rank, at_step))

    def stop(self, *, rank: int, at_step: int, for_s: float, point: str = "forward") -> Faults:
        """SIGSTOP, and SIGCONT after a while."""
        return self._and(Fault("stop", rank, at_step, point, for_s))

    def slow(self, *, rank: int, by_s: float, at_step: int = 0, point: str = "forward") -> Faults:
        """At every step, unless one is named."""
        return self._and(Fault("slow", rank, at_step, point, by_s))

    def full_disk(self, *, rank: int, at_step: int, folder: Path) -> Faults:
        """Fill the disk that a folder is on; it must be a small one, made for this."""
        return self._and(Fault("full_disk", rank, at_step, path=str(folder)))

    def _and(self, fault: Fault) -> Faults:
        assert fault.point in (*POINTS, MERGE)
        return Faults((*self.plan, fault))

    @property
    def env(self) -> dict[str, str]:
        return {"FAULTS": json.dumps([asdict(fault) for fault in self.plan])}

    @classmethod
    def here(cls) -> Faults:
        return cls(tuple(Fault(**each) for each in json.loads(os.environ.get("FAULTS", "[]"))))

    def attach(self, run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Strike when the rank comes to the step, at the point that was said."""

        def at(point: str) -> Callable[..., None]:
            def strike(*_: Any) -> None:
                step = run.step + (point != "after")
                for fault in self.plan:
                    if fault.point == point and fault.rank == run.rank and fault.step in (0, step):
                        fault.strike()

            return strike

        if self.plan:
            middle = list(model.parameters())[len(list(model.parameters())) // 2]
            model.register_forward_pre_hook(at("forward"))
            middle.register_hook(at("backward"))
            before, after, step = at("step"), at("after"), optimizer.step

            def struck(*args: Any, **kwargs: Any) -> Any:
                before()
                result = step(*args, **kwargs)
                after()
                return result

            struck._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
            optimizer.step = struck  # type: ignore[method-assign]
            if any(fault.point == MERGE for fault in self.plan):
                exchange = run._process.mode.merges.exchange
                exchange.begin = _then(exchange.begin, at(MERGE))


def _then(act: Callable[..., None], strike: Callable[..., None]) -> Callable[..., None]:
    def struck(*args: Any, **kwargs: Any) -> None:
        act(*args, **kwargs)
        strike()

    return struck


def fill(folder: Path) -> None:
    room = os.statvfs(folder)
    assert room.f_blocks * room.f_frsize <= 2**26, "a disk of this size is not one to be filled"
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


# --- at a system call -------------------------------------------------------------------------------------------------


def calls_of(pid: int, log: Path) -> Counter[str]:
    """How often a process that has stopped itself makes each system call that touches files, once it goes on."""
    _traced(pid, ["-o", str(log)])
    return Counter(re.findall(r"^\d+ +(\w+)\(", log.read_text(), re.MULTILINE))


def kill_at_call(pid: int, call: str, number: int, log: Path) -> None:
    """SIGKILL a process that has stopped itself, when it comes to a call of this number, before that is made."""
    _traced(pid, ["-o", str(log), "-e", f"inject={call}:signal=SIGKILL:when={number}"])


def _traced(pid: int, options: Sequence[str]) -> None:
    command = ["strace", "-f", "-q", "-e", f"trace={TOUCHING}", "-e", "signal=none", *options, "-p", str(pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not _is_traced(pid):
        assert tracer.poll() is None, tracer.communicate()[1]
        time.sleep(0.005)
    os.kill(pid, signal.SIGCONT)
    tracer.communicate(timeout=60)


def _is_traced(pid: int) -> bool:
    return not re.search(r"TracerPid:\t0\n", Path(f"/proc/{pid}/status").read_text())
