"""Figures of one run: a sample from its folder and its counters, and curves and timelines for plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.lab.contender import WARMUP, Contender, Task
from weft.lab.usage import Usage
from weft.runtime.record import run_folder
from weft.runtime.record.trace import union, without

_TRAILING = 5
"""Steps over which a loss is averaged."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The figures of one run: one contender, one seed."""

    folder: Path
    steps_s: list[float]
    """Step times after warm-up, each the mean over a period."""
    samples: float
    """Samples in a step, of all workers."""
    wire_bytes_worker: float
    bound_bytes: float
    """What the busiest link must carry in a step, one way."""
    wire_bytes_link: float | None
    """Bytes with headers that the busiest link carried in a step, in its busier direction."""
    own_cpu_share: float
    """The share of the processors that the run's processes used during these steps."""
    other_cpu_share: float
    """The share that other processes used during the whole run."""
    cpu_share: float
    steal_share: float
    final_loss: float | None
    time_to_target_s: float | None
    held_out_loss: float | None
    """The last one of the merged model, if the job logs it."""
    time_to_held_out_s: float | None
    host_steps_s: list[float]
    """Each host's own mean step time."""
    merges: run_folder.Merges | None = None
    """The merges of local optimizers, if the contender has them."""
    asynchrony: dict[str, Any] | None = None
    """Staleness of gradients and waits between workers, where there were servers."""


def sample(folder: Path, task: Task, contender: Contender, hosts: int, usage: Usage, whole: Usage) -> Sample:
    """The figures of a run from its folder; `usage` is that of its steps after warm-up, `whole` that of the run."""
    steps = run_folder.events(folder)
    warmup = task.warmup(contender.period)
    timed = steps[warmup:]
    specs = run_folder.model(folder)
    declared = contender.declared_bytes(specs, hosts)
    if contender.strategy is not None:
        sent = run_folder.by_period([event["wire_bytes"] for event in timed], contender.period)
        declared = statistics.median(sent) / hosts
    smooth = _smooth_losses(steps) if task.profile is None else []
    if contender.in_step:
        time_to_target_s = _time_to_target_s(steps, smooth, task.target_loss)
        held_out_s = time_to_held_out_s(steps, task.target_held_out)
    else:
        time_to_target_s = time_to_target_apart_s(folder, hosts, task.target_loss)
        held_out_s = time_to_held_out_apart_s(folder, hosts, task.target_held_out)
    return Sample(
        folder=folder,
        steps_s=run_folder.by_period([event["step_s"] for event in timed], contender.period),
        samples=statistics.median(event["samples"] for event in timed),
        wire_bytes_worker=declared,
        bound_bytes=max(declared, contender.link_bytes(specs, hosts)),
        wire_bytes_link=usage.link_bytes / len(timed) if usage.link_bytes is not None else None,
        own_cpu_share=usage.own_cpu_share,
        other_cpu_share=whole.other_cpu_share,
        cpu_share=usage.cpu_share,
        steal_share=usage.steal_share,
        final_loss=smooth[-1] if smooth else None,
        time_to_target_s=time_to_target_s,
        held_out_loss=_held_out_loss(folder, steps) if task.profile is None else None,
        time_to_held_out_s=held_out_s,
        merges=_merges(steps) if contender.merges_models else None,
        host_steps_s=_host_steps_s(folder, warmup),
        asynchrony=run_folder.asynchrony(rows) if (rows := run_folder.servers(folder)) else None,
    )


def evaluates(folder: Path) -> bool:
    """Whether the job of a run has logged held-out losses."""
    return any(_held_out(event) is not None for event in run_folder.stream(folder))


def _smooth_losses(steps: Sequence[dict[str, Any]]) -> list[float | None]:
    """At each step the mean of the last few losses."""
    losses = [event.get("loss") for event in steps]
    smooth = []
    for end in range(1, len(losses) + 1):
        known = [loss for loss in losses[max(0, end - _TRAILING) : end] if run_folder.is_number(loss)]
        smooth.append(statistics.mean(known) if known else None)
    return smooth


def _time_to_target_s(
    steps: Sequence[dict[str, Any]], smooth: Sequence[float | None], target: float | None
) -> float | None:
    """Seconds of training until the smooth loss is at the target."""
    if target is None:
        return None
    for (seconds, event), loss in zip(_trained(steps), smooth, strict=False):
        if loss is not None and loss <= target and event["step"] >= _TRAILING:
            return seconds
    return None


def time_to_target_apart_s(folder: Path, hosts: int, target: float | None) -> float | None:
    """The same where workers are at different steps: the mean of the last few losses of all workers, in time order."""
    if target is None:
        return None
    lines = _trained_apart(folder)
    losses = [event.get("loss") for _, _, event in lines]
    for end, (seconds, _, _) in enumerate(lines, start=1):
        known = [loss for loss in losses[max(0, end - _TRAILING * hosts) : end] if loss is not None]
        if end >= _TRAILING * hosts and known and statistics.mean(known) <= target:
            return seconds
    return None


def time_to_held_out_s(steps: Sequence[dict[str, Any]], target: float | None) -> float | None:
    """Seconds of training until the held-out loss of the merged model is at the target."""
    if target is None:
        return None
    return next((s for s, event in _trained(steps) if (loss := _held_out(event)) is not None and loss <= target), None)


def time_to_held_out_apart_s(folder: Path, hosts: int, target: float | None) -> float | None:
    """The same where workers are at different steps: until the mean of each worker's latest evaluation is there."""
    if target is None:
        return None
    latest: dict[int, float] = {}
    for seconds, worker, event in _trained_apart(folder):
        if (loss := _held_out(event)) is not None:
            latest[worker] = loss
            if len(latest) == hosts and statistics.mean(latest.values()) <= target:
                return seconds
    return None


def _held_out(event: dict[str, Any]) -> float | None:
    loss = event.get("held_out_loss")
    return float(loss) if run_folder.is_number(loss) else None


def _held_out_loss(folder: Path, steps: Sequence[dict[str, Any]]) -> float | None:
    """The last held-out loss; after the last merge, if the job evaluates again at its end."""
    known = [loss for event in steps if (loss := _held_out(event)) is not None]
    if known and (folder / "report.json").exists():
        known += [loss] if (loss := _held_out(run_folder.read_json(folder, "report.json"))) is not None else []
    return known[-1] if known else None


def _merges(steps: Sequence[dict[str, Any]]) -> run_folder.Merges:
    found = run_folder.Merges()
    for event in steps:
        found.add(event)
    return found


def _trained(steps: Sequence[dict[str, Any]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The events with the seconds from the first step's beginning to their end, without those of evaluations.

    The first step's own time holds the start-up, so the second's stands in for it.
    """
    began = float(steps[0]["time_s"] - (steps[1] if len(steps) > 1 else steps[0])["step_s"])
    for event in steps:
        yield float(event["time_s"] - began), event
        began += event.get("eval_s") or 0.0


def _trained_apart(folder: Path) -> list[tuple[float, int, dict[str, Any]]]:
    """The same for the events of all processes, with their numbers, in the order of each one's own time."""
    workers = run_folder.by_process(folder)
    seconds = [event["step_s"] for events in workers for event in events if event["step"] == 2] or [0.0]
    began = min(event["time_s"] for events in workers for event in events) - statistics.median(seconds)
    lines = []
    for worker, events in enumerate(workers):
        evaluated_s = 0.0
        for event in events:
            lines.append((float(event["time_s"] - began - evaluated_s), worker, event))
            evaluated_s += event.get("eval_s") or 0.0
    return sorted(lines, key=lambda line: line[0])


def _host_steps_s(folder: Path, warmup: int) -> list[float]:
    """Each host's mean step after warm-up."""
    return [
        statistics.mean(event["step_s"] for event in events if event["step"] > warmup)
        for events in run_folder.by_process(folder)
    ]


# --- for plots ------------------------------------------------------------------------------------------------------


def curve(sample: Sample) -> dict[str, list[float]] | None:
    """Loss against time and against bytes sent by a worker."""
    steps = run_folder.events(sample.folder)
    known = [(seconds, event) for seconds, event in _trained(steps) if run_folder.is_number(event.get("loss"))]
    if not known:
        return None
    return {
        "time_s": [seconds for seconds, _ in known],
        "bytes": [sample.wire_bytes_worker * event["step"] for _, event in known],
        "loss": [event["loss"] for _, event in known],
    }


def timeline(folder: Path, warmup: int = WARMUP) -> dict[str, Any] | None:
    """One step of process 0 of median length, traced: what the loop does, and each bucket's time on the wire.

    The step lasts from the end of the previous one to its own. Waits and updates that belong to the previous step are
    shown where they happen, and its buckets while they are on the wire.
    """
    try:
        events = json.loads((folder / "trace-0.json").read_text(encoding="utf-8"))["traceEvents"]
    except (OSError, ValueError, KeyError):
        return None
    spans = [
        (e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e["args"]["step"]) for e in events if e["ph"] == "X"
    ]
    ends = {step: end for name, _, end, step in spans if name == "optimizer"}
    lengths = {step: end - ends[step - 1] for step, end in ends.items() if step > warmup and step - 1 in ends}
    if not lengths:
        return None
    middle = sorted(lengths, key=lambda step: lengths[step])[len(lengths) // 2]
    began, ended = ends[middle - 1], ends[middle]
    inside = [(name, max(start, began) - began, min(end, ended) - began) for name, start, end, _ in spans]
    inside = sorted((each for each in inside if each[1] < each[2]), key=lambda each: each[1:])
    wire = [[int(name.split()[1]), start, end] for name, start, end in inside if name.startswith("bucket ")]
    return {"loop": _loop(inside), "wire": wire}


def _loop(spans: Sequence[tuple[str, float, float]]) -> list[list[Any]]:
    """The phases of the loop without overlaps: waits and updates interrupt forward and backward."""
    pauses = [(_PAUSES[name], start, end) for name, start, end in spans if name in _PAUSES]
    busy = union((start, end) for _, start, end in pauses)
    phases = [
        (name, *rest)
        for name, start, end in spans
        if name in ("forward", "backward")
        for rest in without((start, end), busy)
    ]
    return [list(each) for each in sorted([*pauses, *phases], key=lambda each: each[1])]


_PAUSES = {"wait": "wait", "update": "optimizer", "optimizer": "optimizer"}
