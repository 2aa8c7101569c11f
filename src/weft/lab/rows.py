"""How far a comparison is, and what its rows say: figures from samples, by the definitions of docs/lab.md."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field
from typing import Any

from weft.lab.spec import CompareSpec
from weft.lab.trial import Contender, Sample
from weft.profile import Profile


@dataclass
class Board:
    """How far a comparison is, for whoever watches: what is done, and what runs."""

    spec: CompareSpec
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    alone: list[Sample] = field(default_factory=list)
    one_host: Sample | None = None
    links: list[dict[str, Any]] = field(default_factory=list)
    threads: int = 1
    emulated: bool = True
    profile: Profile | None = None
    running: str = ""
    event: dict[str, Any] = field(default_factory=dict)
    expected_s: float | None = None
    interrupted: bool = False

    def rows(self) -> list[dict[str, Any]]:
        return [self._row(contender) for contender in self.spec.contenders]

    def _row(self, contender: Contender) -> dict[str, Any]:
        samples = self.samples.get(contender.name, [])
        kind = "peer" if contender.peer else "strategy"
        row: dict[str, Any] = {"name": contender.name, "kind": kind, "sentence": contender.sentence}
        if not samples:
            reason = self.errors.get(contender.name) or ("stopped before it ran" if self.interrupted else "not run yet")
            return row | dict.fromkeys(_FIGURES) | {"compute": self.spec.compute, "error": reason}
        times = [seconds for sample in samples for seconds in sample.steps_s]
        step_s, middle = statistics.median(times), statistics.median
        alone = self.computing_alone()
        busy = middle(sample.busy_s for sample in samples)
        wire = middle(sample.wire_bytes_worker for sample in samples)
        rates = [link["payload_bytes_s"] for link in self.links]
        carried = middle(sample.bound_bytes for sample in samples)
        bound = max(self._computing_bound(alone, busy), carried / min(rates) if rates else 0.0)
        known = [sample.final_loss for sample in samples if sample.final_loss is not None]
        reached = [sample.time_to_target_s for sample in samples if sample.time_to_target_s is not None]
        counted = [sample.wire_bytes_link for sample in samples if sample.wire_bytes_link is not None]
        rate = samples[0].samples / step_s if contender.in_step else middle(map(self._together, samples))
        figures = {
            "step_s": step_s,
            "step_s_spread": _spread(times),
            "samples_per_s": rate,
            "speedup": rate * self.one_host_s() / self.one_host.samples if self.one_host else None,
            "wire_bytes_worker": wire,
            "wire_bytes_link": middle(counted) if counted else None,
            "exposed_s": max(0.0, step_s - alone),
            "compute_s": alone,
            "bound_s": bound,
            "bound_share": bound / step_s,
            "final_loss": middle(known) if known else None,
            "time_to_target_s": middle(reached) if len(reached) == len(samples) else None,
            "asynchrony": samples[0].asynchrony,
        }
        return row | figures | {"compute": self.spec.compute, "error": self.errors.get(contender.name)}

    def _together(self, sample: Sample) -> float:
        """Samples in a second where every host goes at its own pace: the sum of their rates."""
        return sum(sample.samples / self.spec.hosts / seconds for seconds in sample.host_steps_s)

    def one_host_s(self) -> float:
        assert self.one_host is not None
        return statistics.median(self.one_host.steps_s)

    def computing_alone(self) -> float:
        """The slowest host's mean step while all compute and nobody sends."""
        if self.alone:
            return statistics.median(max(sample.host_steps_s) for sample in self.alone)
        return self.one_host_s() if self.one_host else 0.0

    def _computing_bound(self, alone: float, busy: float) -> float:
        """Where computing fills the cores, communication's own processor time comes on top."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        filled = self.spec.compute == "real" and self.spec.hosts * self.threads >= cores
        if not filled or not self.alone:
            return alone
        extra = busy - statistics.median(sample.busy_s for sample in self.alone)
        return alone + max(0.0, extra) / cores


_FIGURES = (
    *("step_s", "step_s_spread", "samples_per_s", "speedup", "wire_bytes_worker", "wire_bytes_link", "exposed_s"),
    *("compute_s", "bound_s", "bound_share", "final_loss", "time_to_target_s", "asynchrony"),
)


def _spread(times: list[float]) -> float:
    """The interquartile range."""
    if len(times) < 2:
        return 0.0
    quartiles = statistics.quantiles(times, n=4)
    return quartiles[2] - quartiles[0]
