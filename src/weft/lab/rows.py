"""A comparison's rows: one for each contender, its figures by the definitions of docs/lab.md.

`Row` is the one definition of a row's keys. The JSON, the terminal's table, the report and its plots derive from it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from weft.lab import learning
from weft.lab.contender import Contender
from weft.lab.figures import Sample
from weft.lab.spec import Compute
from weft.runtime.record.run_folder import Merges

Result = dict[str, Any]
"""A comparison as JSON, the content of compare.json."""
_MEASURING_ERROR = 1.03
"""By which a bound may exceed the step; the accuracy of measured links."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender's result. Without a finished run all figures are None, and `error` is the reason."""

    name: str
    kind: Literal["strategy", "peer", "one host"]
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
    """The step of the slowest host (without lockstep, the mean of the hosts) while all compute and nothing is sent."""
    bound_s: float | None = None
    """A lower bound of the step: the largest of computing alone, the run's processor time over the processors, and the
    bytes over the links' measured rate. None where the step is shorter, because computing alone was disturbed."""
    bound_share: float | None = None
    """`bound_s / step_s`."""
    final_loss: float | None = None
    time_to_target_s: float | None = None
    """Seconds until the loss is at the target, if every seed got there."""
    held_out_loss: float | None = None
    """That of the merged model at the end, if the job logs it while it trains."""
    time_to_held_out_s: float | None = None
    """Seconds until the held-out loss is at its target, if every seed got there; evaluation is not counted."""
    merges: int | None = None
    """The number of merges of local optimizers; None for other contenders, as the next two."""
    merge_s: float | None = None
    """Seconds of the whole run for which merges held the loop up."""
    consensus: float | None = None
    """At the last merge: the distance of the local models from their mean, relative to the norm of the anchor."""
    learning: float | None = None
    """The held-out loss over that of dense training, as measured once (`learning.py`); None where it was not."""
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


def by_step(rows: Iterable[Row]) -> list[Row]:
    """The fastest first, and last those without a step."""
    return sorted(rows, key=lambda row: math.inf if row.step_s is None or not row.finished else row.step_s)


def one_host_row(result: Mapping[str, Any]) -> Row | None:
    """One host alone as a row: the time that it takes for as many samples as one step of the others."""
    alone = result["one_host"]
    if alone is None:
        return None
    steps = [row.step_s * row.samples_per_s for row in rows_of(result) if row.step_s and row.samples_per_s]
    step_s = statistics.median(steps) / alone["samples_per_s"] if steps else alone["step_s"]
    return Row(
        name="one host alone",
        kind="one host",
        sentence="The time that one host takes for as many samples, without communication.",
        step_s=step_s,
        step_s_spread=alone["step_s_spread"] * step_s / alone["step_s"],
        samples_per_s=alone["samples_per_s"],
        speedup=1.0,
        learning=1.0,
        compute=result["compute"],
    )


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The measurements that a row's figures refer to."""

    hosts: int
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

    def compute_s(self, in_step: bool) -> float:
        """The step while all hosts compute and nothing is sent: the slowest host's, or without lockstep their mean."""
        if self.alone:
            return statistics.median((max if in_step else statistics.mean)(each.host_steps_s) for each in self.alone)
        return self.one_host_s if self.one_host else 0.0

    def bound_s(self, step_s: float, compute_s: float, cpu_share: float, bound_bytes: float) -> float | None:
        """The lower bound of a step in which the run's processes used this share of the processors."""
        working_s = cpu_share * step_s if self.compute == "real" else 0.0
        sending_s = bound_bytes / self.payload_bytes_s if self.payload_bytes_s else 0.0
        bound_s = max(compute_s, working_s, sending_s)
        return min(bound_s, step_s) if bound_s <= _MEASURING_ERROR * step_s else None

    def speedup(self, samples_per_s: float) -> float | None:
        return samples_per_s * self.one_host_s / self.one_host.samples if self.one_host else None


def finished_row(contender: Contender, samples: Sequence[Sample], error: str | None, reference: Reference) -> Row:
    """The row of a contender with at least one finished run; `error` is that of a later one."""
    median = statistics.median
    times = [seconds for sample in samples for seconds in sample.steps_s]
    step_s, compute_s = median(times), reference.compute_s(contender.in_step)
    cpu_share, bound_bytes = median(s.own_cpu_share for s in samples), median(s.bound_bytes for s in samples)
    bound_s = reference.bound_s(step_s, compute_s, cpu_share, bound_bytes)
    if contender.in_step:
        samples_per_s = samples[0].samples / step_s
    else:
        samples_per_s = median(_own_rates(sample, reference.hosts) for sample in samples)
    return Row(
        **_identity(contender),
        step_s=step_s,
        step_s_spread=interquartile_range(times),
        samples_per_s=samples_per_s,
        speedup=reference.speedup(samples_per_s),
        wire_bytes_worker=median(sample.wire_bytes_worker for sample in samples),
        wire_bytes_link=_median_of_known([sample.wire_bytes_link for sample in samples]),
        exposed_s=max(0.0, step_s - compute_s),
        compute_s=compute_s,
        bound_s=bound_s,
        bound_share=bound_s / step_s if bound_s is not None else None,
        final_loss=_median_of_known([sample.final_loss for sample in samples]),
        time_to_target_s=_median_of_all([sample.time_to_target_s for sample in samples]),
        held_out_loss=_median_of_known([sample.held_out_loss for sample in samples]),
        time_to_held_out_s=_median_of_all([sample.time_to_held_out_s for sample in samples]),
        **_merges([sample.merges for sample in samples if sample.merges is not None]),
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
        "learning": learning.measured(contender),
    }


def _merges(runs: Sequence[Merges]) -> dict[str, Any]:
    """The figures of the merges of local optimizers, the medians of the runs."""
    if not runs:
        return {}
    return {
        "merges": round(statistics.median(run.merges for run in runs)),
        "merge_s": statistics.median(run.merge_s for run in runs),
        "consensus": _median_of_known([run.consensus for run in runs]),
    }


def _own_rates(sample: Sample, hosts: int) -> float:
    """Samples per second where every host is at a step of its own: the sum of the hosts' rates."""
    return sum(sample.samples / hosts / seconds for seconds in sample.host_steps_s)


def _median_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _median_of_all(values: Sequence[float | None]) -> float | None:
    """The median, if no value is missing."""
    return None if None in values else _median_of_known(values)


def interquartile_range(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    quartiles = statistics.quantiles(times, n=4)
    return quartiles[2] - quartiles[0]
