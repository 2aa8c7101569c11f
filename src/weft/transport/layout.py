"""The assignment of logical workers to processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The logical workers of each process: contiguous ranges whose lengths differ by one at most."""

    workers: int
    processes: int = 1
    process: int = 0
    """The process that this value describes."""

    @property
    def is_even(self) -> bool:
        """Whether every process carries as many workers."""
        return self.workers % self.processes == 0

    def carried(self, process: int | None = None) -> range:
        """Ranks of the workers of a process; by default of this one."""
        p = self.process if process is None else process
        return range(p * self.workers // self.processes, (p + 1) * self.workers // self.processes)
