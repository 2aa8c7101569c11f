"""One contender, one seed: the job really run on the cluster, and what was measured meanwhile.

Counters (links, processors) are read when the warm-up is over and when the last step is done, so that start-up, first
copies and evaluation are in no figure.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.axis import DEFAULTS
from weft.errors import JobError
from weft.lab import peers
from weft.lab.cluster import Cluster, Loopback
from weft.ops import Spec
from weft.profile import Profile
from weft.runtime.launch.launcher import Launch, Seat, launch
from weft.runtime.pace import Slow
from weft.runtime.record import run_folder
from weft.store.checkpoint import Policy
from weft.strategy import Strategy

Site = Cluster | Loopback
WARMUP = 5
_TRAILING = 5
_SEEN = 0.9
"""The share of its declared bytes that a run must at least have moved over the links."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way of distributing, ours (a strategy) or somebody else's (a peer)."""

    name: str
    strategy: Strategy | None = None
    peer: str | None = None

    @property
    def sentence(self) -> str:
        if self.peer is not None:
            return peers.find(self.peer).sentence
        assert self.strategy is not None
        silent = {axis: DEFAULTS[axis] for axis in ("partition", "optimization")}
        return " ".join(answer.summary for axis, answer in self.strategy.answers() if silent.get(axis) != str(answer))

    @property
    def period(self) -> int:
        """Steps after which its pattern repeats; step times are averaged over so many."""
        if self.peer is not None:
            return peers.find(self.peer).period
        return self.strategy.optimization.period if self.strategy is not None else 1

    @property
    def in_step(self) -> bool:
        """Whether all workers take each step together."""
        return self.strategy is None or self.strategy.synchrony.lockstep

    def server_hosts(self, workers: int) -> tuple[int, ...]:
        """Where its servers sit, if it has any."""
        return self.strategy.server_hosts(workers) if self.strategy is not None else ()

    def declared_bytes(self, specs: Sequence[Spec], workers: int) -> float:
        """What one worker must send in a step, on average."""
        if workers == 1:
            return 0.0
        if self.peer is not None:
            return peers.find(self.peer).bytes(specs, workers)
        assert self.strategy is not None
        return self.strategy.wire_bytes(specs, workers) * self.strategy.optimization.pushes

    def link_bytes(self, specs: Sequence[Spec], workers: int) -> float:
        """What the busiest link must carry in a step, on average, one way, where servers send models back; else 0."""
        if self.strategy is None or not self.strategy.has_servers:
            return 0.0
        often, model = self.strategy.optimization, sum(spec.nbytes for spec in specs)
        pushed = self.strategy.push_bytes(specs) * often.pushes
        return self.strategy.server_topology.link_bytes(pushed, model * often.fetches, workers)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every contender runs."""

    job: str
    args: tuple[str, ...] = ()
    steps: int = 30
    slow: Mapping[int, Slow] = field(default_factory=dict)
    profile: Profile | None = None
    """Sleep through computing by this profile; None: compute for real."""
    target_loss: float | None = None

    def warmup(self, period: int = 1) -> int:
        """Steps that no figure counts: at least five, and such that whole periods follow."""
        whole = (self.steps - WARMUP) // period
        return self.steps - whole * period if whole > 0 else min(WARMUP, self.steps - 1)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one run gave."""

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
    busy_s: float
    """Processor seconds of the whole machine in a step."""
    cpu_share: float
    steal_share: float
    final_loss: float | None
    time_to_target_s: float | None
    host_steps_s: list[float]
    """Each host's own mean step time."""
    asynchrony: dict[str, Any] | None = None
    """How late gradients were, and who waited for whom, where there were servers."""


@dataclass(frozen=True)
class _Reading:
    """Counters at one moment."""

    links: list[tuple[int, int]] | None
    busy_s: float
    steal_s: float
    all_s: float

    @classmethod
    def now(cls, site: Site) -> _Reading:
        ticks = os.sysconf("SC_CLK_TCK")
        try:
            line = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
        except OSError:
            line = ["0"] * 8
        user, nice, system, idle, waiting, hard, soft, steal = (int(part) / ticks for part in line)
        busy = user + nice + system + hard + soft
        return cls(site.counters(), busy, steal, busy + idle + waiting + steal)

    def busiest(self, later: _Reading) -> int | None:
        """Bytes of the link that has carried most between two readings, in its busier direction."""
        if self.links is None or later.links is None:
            return None
        return max(b - a for x, y in zip(self.links, later.links, strict=True) for a, b in zip(x, y, strict=True))


def run(
    task: Task,
    site: Site,
    contender: Contender,
    seed: int,
    out: Path,
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
    *,
    hosts: int,
    trace: bool = False,
    profile_to: Path | None = None,
) -> Sample:
    """Run a contender once. Raises JobFailedError where it fails, JobError where its traffic went around the links."""
    readings: list[_Reading] = []

    def on_progress(event: dict[str, Any]) -> None:
        if "mark" in event:
            readings.append(_Reading.now(site))
        else:
            on_event(event)

    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="weft-lab-") as scratch:
        spec = Launch(
            job=task.job,
            args=task.args,
            workers=hosts,
            servers=len(contender.server_hosts(hosts)),
            survives_worker_loss=contender.strategy is not None and contender.strategy.survives_worker_loss,
            strategy=contender.strategy,
            steps=task.steps,
            seed=seed,
            device="cpu",
            out=out,
            trace=trace,
            policy=Policy(every=0),
            seats=_seats(task, site, contender, hosts, Path(scratch), profile_to),
            module="weft.lab.peers._child" if contender.peer else "weft.runtime.launch.child",
        )
        first = _Reading.now(site)
        launch(spec, lambda rank, line: said.append(f"[{rank}] {line}"), on_progress)
        last = _Reading.now(site)
    with suppress(OSError):
        (out / "output.txt").write_text("\n".join(said) + "\n", encoding="utf-8")
    if len(readings) != 2:
        raise JobError(f"the job ended before its {task.steps} steps; give --steps fewer, or the job more data")
    _check_links(contender, hosts, out, first.busiest(last))
    return _judge(task, contender, hosts, out, readings)


def _seats(
    task: Task, site: Site, contender: Contender, hosts: int, scratch: Path, profile_to: Path | None
) -> tuple[Seat, ...]:
    """The hosts' seats, with what the run must know beside the job."""
    env = {"WEFT_MARKS": f"{task.warmup(contender.period)},{task.steps}"}
    if contender.peer:
        env["WEFT_PEER"] = contender.peer
    if task.profile is not None:
        task.profile.write(scratch / "profile.json")
        env["WEFT_SLEEP"] = str(scratch / "profile.json")
    if profile_to is not None:
        env["WEFT_PROFILE"] = str(profile_to)
    seats = []
    for host, seat in enumerate(site.seats(range(hosts))):
        seats.append(slow_seat(replace(seat, env={**seat.env, **env}), task.slow.get(host)))
    return (*seats, *site.seats(contender.server_hosts(hosts)))


def slow_seat(seat: Seat, slow: Slow | None) -> Seat:
    """The same seat for a straggler."""
    return replace(seat, env={**seat.env, "WEFT_SLOW": str(slow)}) if slow else seat


def _check_links(contender: Contender, hosts: int, out: Path, seen: int | None) -> None:
    """What a worker says that it sent in the whole run must have crossed a link. The whole run, because steps of a
    millisecond are over before a reading at one of them is taken."""
    steps = run_folder.events(out)
    if contender.strategy is not None:
        declared = sum(event["wire_bytes"] for event in steps) / hosts
    else:
        whole = len(steps) // contender.period * contender.period
        declared = whole * contender.declared_bytes(run_folder.model(out), hosts)
    if seen is not None and seen < _SEEN * declared:
        raise JobError(
            f"{contender.name} says that a worker sends {declared:.0f} bytes, but the links saw {seen}: "
            "its traffic went around them, and the figures would be false"
        )


def _judge(task: Task, contender: Contender, hosts: int, out: Path, readings: list[_Reading]) -> Sample:
    before, after = readings
    steps = run_folder.events(out)
    warmup = task.warmup(contender.period)
    timed = steps[warmup:]
    specs = run_folder.model(out)
    declared = contender.declared_bytes(specs, hosts)
    if contender.strategy is not None:
        sent = run_folder.by_period([event["wire_bytes"] for event in timed], contender.period)
        declared = statistics.median(sent) / hosts
    moved = before.busiest(after)
    spent = after.all_s - before.all_s
    losses = [event.get("loss") for event in steps]
    smooth = [_trailing(losses, at) for at in range(len(losses))] if task.profile is None else []
    return Sample(
        folder=out,
        steps_s=run_folder.by_period([event["step_s"] for event in timed], contender.period),
        samples=statistics.median(event["samples"] for event in timed),
        wire_bytes_worker=declared,
        bound_bytes=max(declared, contender.link_bytes(specs, hosts)),
        wire_bytes_link=moved / len(timed) if moved is not None else None,
        busy_s=(after.busy_s - before.busy_s) / len(timed),
        cpu_share=(after.busy_s - before.busy_s) / spent if spent else 0.0,
        steal_share=(after.steal_s - before.steal_s) / spent if spent else 0.0,
        final_loss=smooth[-1] if smooth else None,
        time_to_target_s=_reached(steps, smooth, task.target_loss)
        if contender.in_step
        else reached_apart(out, hosts, task.target_loss),
        host_steps_s=_host_means(out, warmup),
        asynchrony=run_folder.asynchrony(rows) if (rows := run_folder.servers(out)) else None,
    )


def _trailing(losses: list[Any], at: int) -> float | None:
    """The mean of the last few losses up to a step."""
    known = [loss for loss in losses[max(0, at + 1 - _TRAILING) : at + 1] if isinstance(loss, (int, float))]
    return statistics.mean(known) if known else None


def _reached(steps: list[dict[str, Any]], smooth: list[float | None], target: float | None) -> float | None:
    """Seconds from the first step's beginning until the trailing loss is at the target."""
    if target is None:
        return None
    began = _began(steps)
    for event, loss in zip(steps, smooth, strict=False):
        if loss is not None and loss <= target and event["step"] >= _TRAILING:
            return float(event["time_s"] - began)
    return None


def reached_apart(out: Path, hosts: int, target: float | None) -> float | None:
    """The same where workers are at different steps: the mean of the last few losses of all of them, as time goes."""
    if target is None:
        return None
    lines = [json.loads(line) for file in out.glob("events-*.jsonl") for line in file.read_text().splitlines()]
    lines.sort(key=lambda event: float(event["time_s"]))
    losses = [event.get("loss") for event in lines]
    seconds = [event["step_s"] for event in lines if event["step"] == 2] or [0.0]
    began = min(event["time_s"] for event in lines) - statistics.median(seconds)
    for at, event in enumerate(lines):
        known = [loss for loss in losses[max(0, at + 1 - _TRAILING * hosts) : at + 1] if loss is not None]
        if at + 1 >= _TRAILING * hosts and known and statistics.mean(known) <= target:
            return float(event["time_s"] - began)
    return None


def _began(steps: list[dict[str, Any]]) -> float:
    """When training began: the first step's own time holds the start-up, so the second's stands in for it."""
    return float(steps[0]["time_s"] - (steps[1] if len(steps) > 1 else steps[0])["step_s"])


def _host_means(out: Path, warmup: int) -> list[float]:
    means = []
    for file in sorted(out.glob("events-*.jsonl")):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        means.append(statistics.mean(event["step_s"] for event in lines if event["step"] > warmup))
    return means


# --- for pictures ---------------------------------------------------------------------------------------------------


def curve(sample: Sample) -> dict[str, list[float]] | None:
    """Loss against time and against bytes sent by a worker."""
    steps = run_folder.events(sample.folder)
    known = [event for event in steps if isinstance(event.get("loss"), (int, float))]
    if not known:
        return None
    began = _began(steps)
    return {
        "time_s": [event["time_s"] - began for event in known],
        "bytes": [sample.wire_bytes_worker * event["step"] for event in known],
        "loss": [event["loss"] for event in known],
    }


def timeline(out: Path, warmup: int = WARMUP) -> dict[str, Any] | None:
    """One typical step of process 0, traced: what the loop did, and when each bucket was on the wire."""
    try:
        events = json.loads((out / "trace-0.json").read_text(encoding="utf-8"))["traceEvents"]
    except (OSError, ValueError, KeyError):
        return None
    by_step: dict[int, list[Any]] = {}
    for event in events:
        if "args" in event and "step" in event["args"] and event["args"]["step"] > warmup:
            by_step.setdefault(event["args"]["step"], []).append(event)
    if not by_step:
        return None
    lengths = {
        step: max(e["ts"] + e["dur"] for e in mine) - min(e["ts"] for e in mine) for step, mine in by_step.items()
    }
    middle = sorted(lengths, key=lambda step: lengths[step])[len(lengths) // 2]
    start = min(event["ts"] for event in by_step[middle])
    loop, wire = [], []
    for event in sorted(by_step[middle], key=lambda event: event["ts"]):
        at, end = (event["ts"] - start) / 1e6, (event["ts"] - start + event["dur"]) / 1e6
        if event["name"].startswith("bucket "):
            wire.append([int(event["name"].split()[1]), at, end])
        elif event["name"] in ("forward", "backward", "wait", "optimizer"):
            loop.append([event["name"], at, end])
    return {"loop": loop, "wire": wire}
