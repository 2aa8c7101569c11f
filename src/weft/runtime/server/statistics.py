"""Statistics of a server: staleness of gradients, waits between workers, and load."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Statistics:
    """Counts of one server; `row` is written to the run folder as server-<i>.json."""

    workers: int
    staleness: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By (worker, staleness in updates): the number of contributions."""
    depths: Counter[int] = field(default_factory=Counter)
    """By queue length: the number of requests that found it so."""
    received_bytes: int = 0
    sent_bytes: int = 0
    waits_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """By (waiting worker, worker it waited for): seconds."""
    _last: dict[int, tuple[int, float, int]] = field(default_factory=dict)

    def updated(self, worker: int, staleness: int) -> None:
        """A worker's contribution became part of an update."""
        self.staleness[worker, staleness] += 1

    def answered(self, worker: int, step: int, waited_s: float, by: int) -> None:
        """A worker's pull was answered after this wait, triggered by the gradients of another worker.

        The wait of a step is that of its last bundle.
        """
        known = self._last.get(worker)
        if known is not None and known[0] != step:
            _, seconds, blamed = known
            self.waits_s[worker, blamed] = self.waits_s.get((worker, blamed), 0.0) + seconds
        if known is None or known[0] != step or waited_s > known[1]:
            self._last[worker] = step, waited_s, by

    def row(self, server: int, updates: int) -> dict[str, Any]:
        waiting = sum(depth * count for depth, count in self.depths.items())
        return {
            "server": server,
            "updates": updates,
            "staleness": [[worker, late, count] for (worker, late), count in sorted(self.staleness.items())],
            "queue_mean": waiting / self.depths.total() if self.depths else None,
            "queue_most": max(self.depths, default=None),
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
            "waits": [[who, on, round(seconds, 4)] for (who, on), seconds in sorted(self.waits_s.items())],
        }
