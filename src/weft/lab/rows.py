"""A comparison's rows: one for each contender, its figures by the definitions of docs/lab.md.

`Row` is the one definition of a row's keys. The JSON, the terminal's table, the report and its plots derive from it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from weft.lab.contender import Contender
from weft.lab.figures import Sample
from weft.lab.spec import Compute


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender's result. Without a finished run all figures are None, and `error` is the reason."""

    name: str
    kind: Literal["strategy", "peer"]
    sentence: str
    step_s: float | None = None
    """Median over the steps after warm-up of the hosts' mean time."""
    step_s_spread: float | None = None
    """Interquartile range of the same."""
    samples_per_s: float | None = None
    speedup: float | None = None
    """Samples per second over those of one host that has the machine to itself."""
    wire_bytes_worker: float | None = None
    """Bytes that a worker must send in a step, without headers."""
    wire_bytes_link: float | None = None
    """Bytes with headers that the busiest link carried in a step, in its busier direction."""
    exposed_s: float | None = None
    """The step less `compute_s`."""
    compute_s: float | None = None
    """The step of the slowest host while all hosts compute and nothing is sent."""
    bound_s: float | None = None
    """The shortest possible step: the larger of computing and of the bytes over the links' measured rate."""
    bound_share: float | None = None
    """`bound_s / step_s`."""
    final_loss: float | None = None
    time_to_target_s: float | None = None
    """Seconds until the loss is at the target, if every seed got there."""
    asynchrony: dict[str, Any] | None = None
    """Staleness and waits, where there were servers (`run_folder.asynchrony`)."""
    compute: Compute
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether every run ended well; an error may be an empty text."""
        return self.error is None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(result: Mapping[str, Any]) -> list[Row]:
    """The rows of a comparison's JSON result."""
    return [Row(**row) for row in result["rows"]]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The measurements that a row's figures refer to."""

    hosts: int
    threads: int
    compute: Compute
    one_host: Sample | None = None
    """One host that has the machine to itself."""
    alone: Sequence[Sample] = ()
    """All hosts compute, nothing is sent; one sample for each seed."""
    payload_bytes_s: float | None = None
    """The payload rate of the slowest link; None where links are not measured."""

    @property
    def one_host_s(self) -> float:
        """The step of one host that has the machine to itself."""
        assert self.one_host is not None
        return statistics.median(self.one_host.steps_s)

    @property
    def compute_s(self) -> float:
        """The mean step of the slowest host while all hosts compute and nothing is sent."""
        if self.alone:
            return statistics.median(max(sample.host_steps_s) for sample in self.alone)
        return self.one_host_s if self.one_host else 0.0

    def bound_s(self, busy_s: float, bound_bytes: float) -> float:
        """The larger of computing and sending; `busy_s` is the machine's processor time in a step.

        Where computing fills the cores, communication's own processor time comes on top of it.
        """
        compute_s = self.compute_s
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if self.alone and self.compute == "real" and self.hosts * self.threads >= cores:
            extra_s = busy_s - statistics.median(sample.busy_s for sample in self.alone)
            compute_s += max(0.0, extra_s) / cores
        return max(compute_s, bound_bytes / self.payload_bytes_s if self.payload_bytes_s else 0.0)

    def speedup(self, samples_per_s: float) -> float | None:
        return samples_per_s * self.one_host_s / self.one_host.samples if self.one_host else None


def finished_row(contender: Contender, samples: Sequence[Sample], error: str | None, reference: Reference) -> Row:
    """The row of a contender with at least one finished run; `error` is that of a later one."""
    median = statistics.median
    times = [seconds for sample in samples for seconds in sample.steps_s]
    step_s, compute_s = median(times), reference.compute_s
    bound_s = reference.bound_s(median(s.busy_s for s in samples), median(s.bound_bytes for s in samples))
    if contender.in_step:
        samples_per_s = samples[0].samples / step_s
    else:
        samples_per_s = median(_own_rates(sample, reference.hosts) for sample in samples)
    reached = [sample.time_to_target_s for sample in samples]
    return Row(
        **_identity(contender),
        step_s=step_s,
        step_s_spread=_interquartile_range(times),
        samples_per_s=samples_per_s,
        speedup=reference.speedup(samples_per_s),
        wire_bytes_worker=median(sample.wire_bytes_worker for sample in samples),
        wire_bytes_link=_median_of_known([sample.wire_bytes_link for sample in samples]),
        exposed_s=max(0.0, step_s - compute_s),
        compute_s=compute_s,
        bound_s=bound_s,
        bound_share=bound_s / step_s,
        final_loss=_median_of_known([sample.final_loss for sample in samples]),
        time_to_target_s=None if None in reached else _median_of_known(reached),
        asynchrony=samples[0].asynchrony,
        compute=reference.compute,
        error=error,
    )


def unfinished_row(contender: Contender, error: str, compute: Compute) -> Row:
    """The row of a contender without a finished run."""
    return Row(**_identity(contender), compute=compute, error=error)


def _identity(contender: Contender) -> dict[str, Any]:
    return {
        "name": contender.name,
        "kind": "peer" if contender.peer else "strategy",
        "sentence": contender.sentence,
    }


def _own_rates(sample: Sample, hosts: int) -> float:
    """Samples per second where every host is at a step of its own: the sum of the hosts' rates."""
    return sum(sample.samples / hosts / seconds for seconds in sample.host_steps_s)


def _median_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _interquartile_range(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    quartiles = statistics.quantiles(times, n=4)
    return quartiles[2] - quartiles[0]
