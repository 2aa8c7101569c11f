"""One trial: a contender's job really run on the cluster with one seed.

Counters (links, processors) are read when the warm-up is over and when the last step is done, so that start-up, first
copies and evaluation are in no figure.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.environment import LabOptions
from weft.errors import JobError
from weft.lab import figures
from weft.lab.child import MODULE
from weft.lab.cluster import Cluster, Loopback
from weft.lab.contender import Contender, Task
from weft.lab.figures import Sample, Usage
from weft.lab.instruments.straggler import Slow
from weft.runtime.launch.launcher import launch
from weft.runtime.launch.spec import Launch, Seat
from weft.runtime.launch.start import Start
from weft.runtime.record import run_folder
from weft.store.checkpoint import Policy

Site = Cluster | Loopback
_MIN_SEEN = 0.9
"""The share of its declared bytes that a run must at least have moved over the links."""


@dataclass(frozen=True, kw_only=True)
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
        return cls(links=site.counters(), busy_s=busy, steal_s=steal, all_s=busy + idle + waiting + steal)

    def until(self, later: _Reading) -> Usage:
        carried = None
        if self.links is not None and later.links is not None:
            ends = zip(self.links, later.links, strict=True)
            carried = max(b - a for before, after in ends for a, b in zip(before, after, strict=True))
        return Usage(
            link_bytes=carried,
            busy_s=later.busy_s - self.busy_s,
            steal_s=later.steal_s - self.steal_s,
            all_s=later.all_s - self.all_s,
        )


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
    start: Start | None = None,
) -> Sample:
    """Run a contender once; `start` is that of a template which several trials share.

    Raises JobFailedError where it fails, JobError where its traffic went around the links.
    """
    readings: list[_Reading] = []

    def on_progress(event: dict[str, Any]) -> None:
        if "mark" in event:
            readings.append(_Reading.now(site))
        else:
            on_event(event)

    output: list[str] = []
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
            module=MODULE,
        )
        first = _Reading.now(site)
        launch(spec, lambda rank, line: output.append(f"[{rank}] {line}"), on_progress, start)
        last = _Reading.now(site)
    with suppress(OSError):
        (out / "output.txt").write_text("\n".join(output) + "\n", encoding="utf-8")
    if len(readings) != 2:
        raise JobError(f"the job ended before its {task.steps} steps; give --steps fewer, or the job more data")
    _check_links(contender, hosts, out, first.until(last).link_bytes)
    return figures.sample(out, task, contender, hosts, readings[0].until(readings[1]))


def _seats(
    task: Task, site: Site, contender: Contender, hosts: int, scratch: Path, profile_to: Path | None
) -> tuple[Seat, ...]:
    """The hosts' seats; the workers' carry the variables that `lab/child.py` makes instruments from."""
    sleep = scratch / "profile.json" if task.profile is not None else None
    if task.profile is not None and sleep is not None:
        task.profile.write(sleep)
    marks = (task.warmup(contender.period), task.steps)
    env = LabOptions(marks=marks, peer=contender.peer or None, sleep=sleep, profile=profile_to).to_env()
    seats = []
    for host, seat in enumerate(site.seats(range(hosts))):
        seats.append(slow_seat(replace(seat, env={**seat.env, **env}), task.slow.get(host)))
    return (*seats, *site.seats(contender.server_hosts(hosts)))


def slow_seat(seat: Seat, slow: Slow | None) -> Seat:
    """The same seat for a straggler, in a launch whose module is `weft.lab.child`."""
    return replace(seat, env={**seat.env, **LabOptions(slow=str(slow)).to_env()}) if slow else seat


def _check_links(contender: Contender, hosts: int, out: Path, seen: int | None) -> None:
    """Bytes that a worker declares for the whole run must have crossed a link. The whole run, because steps of a
    millisecond are over before a reading at one of them is taken."""
    steps = run_folder.events(out)
    if contender.strategy is not None:
        declared = sum(event["wire_bytes"] for event in steps) / hosts
    else:
        whole = len(steps) // contender.period * contender.period
        declared = whole * contender.declared_bytes(run_folder.model(out), hosts)
    if seen is not None and seen < _MIN_SEEN * declared:
        raise JobError(
            f"{contender.name} says that a worker sends {declared:.0f} bytes, but the links saw {seen}: "
            "its traffic went around them, and the figures would be false"
        )
