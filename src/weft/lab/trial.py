"""One trial: a contender's job really run on the cluster with one seed.

Counters (links, processors) are read when the warm-up is over and when the last step is done, so that start-up, first
copies and evaluation are in no figure of a row. Other processes' use of the machine is that during the whole run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.environment import LabOptions
from weft.errors import JobError
from weft.lab import figures
from weft.lab.child import MODULE
from weft.lab.cluster import Cluster, Loopback
from weft.lab.contender import Contender, Task
from weft.lab.figures import Sample
from weft.lab.instruments.straggler import Slow
from weft.lab.spec import no_held_out_loss
from weft.lab.usage import Reading
from weft.runtime.launch.launcher import launch
from weft.runtime.launch.spec import Launch, Seat
from weft.runtime.launch.start import Start
from weft.runtime.record import run_folder
from weft.store.checkpoint import Policy

Site = Cluster | Loopback
_MIN_SEEN = 0.9
"""The share of its declared bytes that a run must at least have moved over the links."""


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
    readings: list[Reading] = []

    def on_progress(event: dict[str, Any]) -> None:
        if "mark" in event:
            readings.append(Reading.now(site.counters()))
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
        first = Reading.now(site.counters())
        launch(spec, lambda rank, line: output.append(f"[{rank}] {line}"), on_progress, start)
        last = Reading.now(site.counters())
    with suppress(OSError):
        (out / "output.txt").write_text("\n".join(output) + "\n", encoding="utf-8")
    if len(readings) != 2:
        raise JobError(f"the job ended before its {task.steps} steps; give --steps fewer, or the job more data")
    whole = first.until(last)
    _check_links(contender, hosts, out, whole.link_bytes)
    if task.target_held_out is not None and not figures.evaluates(out):
        raise no_held_out_loss(task.job)
    return figures.sample(out, task, contender, hosts, readings[0].until(readings[1]), whole)


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
