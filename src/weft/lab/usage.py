"""The use of links and processors between two moments: by the processes of a run, and by others."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_KERNEL_THREAD = 0x00200000


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The use of links and processors between two readings; shares are of all processors."""

    link_bytes: int | None
    """Bytes with headers of the busiest link, in its busier direction; None where links are not counted."""
    own_cpu_share: float
    """The share that the run's processes used, of the processors that they may use."""
    other_cpu_share: float
    """The share that other processes used."""
    cpu_share: float
    """The share that was used at all."""
    steal_share: float
    """The share that a hypervisor gave to others."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Counters at one moment. Times are processor seconds."""

    at_s: float
    links: Sequence[tuple[int, int]] | None
    own_s: float
    processes_s: float
    """Of all processes, without interrupts."""
    busy_s: float
    steal_s: float
    all_s: float

    @classmethod
    def now(cls, links: Sequence[tuple[int, int]] | None) -> Reading:
        """The counters of this moment, and those of the links. Zeros without /proc."""
        ticks = os.sysconf("SC_CLK_TCK")
        try:
            line = (PROC / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
            own_s = processor_s(os.getpid())
        except OSError:
            line, own_s = ["0"] * 8, 0.0
        user, nice, system, idle, waiting, hard, soft, steal = (int(part) / ticks for part in line)
        busy = user + nice + system + hard + soft
        return cls(
            at_s=time.monotonic(),
            links=links,
            own_s=own_s,
            processes_s=user + nice + system,
            busy_s=busy,
            steal_s=steal,
            all_s=busy + idle + waiting + steal,
        )

    def until(self, later: Reading) -> Usage:
        carried = None
        if self.links is not None and later.links is not None:
            ends = zip(self.links, later.links, strict=True)
            carried = max(b - a for before, after in ends for a, b in zip(before, after, strict=True))
        own_s, all_s = later.own_s - self.own_s, later.all_s - self.all_s
        there_were_s = (later.at_s - self.at_s) * _cores()
        others_s = later.processes_s - self.processes_s - own_s

        def share(seconds: float, of: float) -> float:
            return min(1.0, max(0.0, seconds / of)) if of else 0.0

        return Usage(
            link_bytes=carried,
            own_cpu_share=share(own_s, there_were_s),
            other_cpu_share=share(others_s, all_s),
            cpu_share=share(later.busy_s - self.busy_s, all_s),
            steal_share=share(later.steal_s - self.steal_s, all_s),
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_s(root: int, proc: Path = PROC) -> float:
    """Processor seconds of a process, of everything that it has started, and of the kernel's threads."""
    ticks = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            line = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it has ended; its parent's counters include it
        after_name = line.rpartition(")")[2].split()
        pid, parent, flags = int(folder.name), int(after_name[1]), int(after_name[6])
        parents[pid] = root if flags & _KERNEL_THREAD else parent
        seconds[pid] = sum(map(int, after_name[11:15])) / ticks

    def counts(pid: int) -> bool:
        while pid not in (root, 0):
            pid = parents.get(pid, 0)
        return pid == root

    return sum(spent for pid, spent in seconds.items() if counts(pid))
