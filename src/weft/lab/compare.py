"""The same job under several ways of distributing it, really run, side by side.

    result = weft.compare("wide", "bsp / ring", "bsp / ring / cast", peers=["ddp"], hosts=4, bandwidth="1gbit")
    result.rows;  result.report        # a notebook shows the report by itself

Runs are interleaved: every seed is one round through all contenders, every other round in reverse.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.lab import figures, trial
from weft.lab import peers as others
from weft.lab.child import MODULE
from weft.lab.cluster import Cluster, Loopback, NoLabError
from weft.lab.contender import Contender, Task
from weft.lab.figures import Sample
from weft.lab.progress import Progress
from weft.lab.report import write_report
from weft.lab.rows import interquartile_range
from weft.lab.spec import CompareSpec, contenders, parse_slow, spelled
from weft.lab.trial import Site
from weft.lab.verdict import headline
from weft.profile import Profile
from weft.runtime.launch.launcher import find_job
from weft.runtime.launch.start import Start, can_fork, template
from weft.runtime.launch.supervise import JobFailedError
from weft.runtime.record import run_folder
from weft.runtime.record.files import write_json
from weft.runtime.record.new_folder import folder_name, new_folder, remove_folder
from weft.strategy import Strategy

_ALONE = Contender(name="computing alone", peer="alone")
_SURVEY_STEPS = 10


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison; a notebook shows its report."""

    result: dict[str, Any]
    """All figures, as in `compare.json`."""
    folder: Path
    """The result folder."""
    report: Path | None
    """The HTML file; None where it could not be drawn."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The figures of each contender; docs/lab.md lists the keys."""
        return list(self.result["rows"])

    def _repr_html_(self) -> str:
        """The report in a frame of its own, so that a notebook's style and the report's stay apart."""
        if self.report is None:
            return f"<pre>{escape(str(self.result['rows']))}</pre>"
        page = escape(self.report.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width:100%;height:900px;border:0"></iframe>'


def compare(
    job: str,
    *strategies: str | Strategy | Mapping[str, str],
    peers: Sequence[str] = (),
    watch: Callable[[Progress], None] = lambda _: None,
    **options: Any,
) -> Comparison:
    """Run `job` under each strategy and peer on an emulated cluster, and compare.

    Without a strategy: under default ones, and the peer `ddp` unless `peers` names others. A mapping names its
    strategies. `options` are the fields of `CompareSpec`: hosts, bandwidth, links, slow, compute,
    profile, steps, seeds, target_loss, target_held_out, network, out, args.
    """
    return conduct(CompareSpec(job=job, contenders=contenders(strategies, peers), **options).checked(), watch)


def conduct(spec: CompareSpec, watch: Callable[[Progress], None]) -> Comparison:
    """Carry a comparison out. Interrupted, it keeps and reports what is finished."""
    name = folder_name(f"compare-{find_job(spec.job).stem}", time.localtime())
    folder, made = new_folder(Path(spec.out) if spec.out is not None else None, name)
    out = folder.absolute()
    progress = Progress(spec=spec)
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        with _site(spec) as site, _template(site) as start:
            progress.links, progress.threads = [link.row() for link in site.links], site.threads
            progress.emulated = isinstance(site, Cluster)
            _runs(spec, progress, site, start, out, watch)
    except BaseException as error:
        progress.interrupted = isinstance(error, KeyboardInterrupt)
        if not progress.interrupted or not (progress.samples or progress.errors):
            if made:
                remove_folder(out)
            raise
    result = _result(spec, progress, out, began)
    write_json(out / "compare.json", result)
    try:
        report = write_report(result, out)
    except UserError:
        report = None
    if progress.interrupted:
        watch(progress)
    return Comparison(result, out, report)


@contextmanager
def _site(spec: CompareSpec) -> Iterator[Site]:
    """The cluster, or plain processes where that was asked for or nothing else can be."""
    if spec.network != "loopback":
        with ExitStack() as stack:
            try:
                cluster = stack.enter_context(Cluster(spec.all_hosts, spec.bandwidth, spec.links))
            except NoLabError:
                if spec.network == "emulated":
                    raise
            else:
                yield cluster
                return
    yield Loopback(spec.all_hosts)


def _template(site: Site) -> AbstractContextManager[Start | None]:
    """One template for all trials, where processes can be forked."""
    return template(MODULE, site.threads) if can_fork() else nullcontext()


def _runs(
    spec: CompareSpec,
    progress: Progress,
    site: Site,
    start: Start | None,
    out: Path,
    watch: Callable[[Progress], None],
) -> None:
    """One host first, then rounds; computing alone is measured in every round, as one contender among others.

    With sleeping compute, one host first measures the profile and then sleeps by it, as the others do.
    """

    def once(contender: Contender, task: Task, seed: int, name: str, **more: Any) -> Sample:
        def on_event(event: dict[str, Any]) -> None:
            progress.event = event
            watch(progress)

        progress.running, progress.event = contender.name, {}
        watch(progress)
        return trial.run(task, site, contender, seed, out / name, on_event, start=start, **{"hosts": spec.hosts} | more)

    task = Task(job=spec.job, args=spec.args, steps=spec.steps, target_loss=spec.target_loss)
    profile_file = out / "profile.json"
    short = replace(task, steps=min(spec.steps, _SURVEY_STEPS), profile=spec.profile)
    started = time.monotonic()
    one = Contender(name="one host", strategy=Strategy())
    measured = None if spec.profile else profile_file
    progress.one_host = once(one, short, 0, "one-host", hosts=1, profile_to=measured)
    startup = time.monotonic() - started - short.steps * progress.reference.one_host_s
    if spec.compute == "sleep":
        progress.profile = spec.profile or Profile.read(profile_file)
        progress.profile.write(profile_file)
    if measured and progress.profile:
        progress.one_host = once(one, replace(short, profile=progress.profile), 0, "one-host-asleep", hosts=1)
    slow = parse_slow(spec.slow, spec.hosts)
    task = replace(task, slow=slow, profile=progress.profile, target_held_out=spec.target_held_out)
    progress.forecast_s = _expected(spec, progress, startup)
    progress.expected_s = sum(progress.forecast_s.values()) * spec.seeds
    watch(progress)
    for seed in range(spec.seeds):
        order = [_ALONE, *spec.contenders]
        for contender in order if seed % 2 == 0 else reversed(order):
            if contender.name in progress.errors:
                continue
            number = order.index(contender)
            try:
                _fit(contender, spec)
                sample = once(contender, task, seed, f"{number:02d}-seed{seed}", trace=seed == 0)
            except (JobFailedError, UserError) as error:
                if contender is _ALONE:
                    raise
                progress.errors[contender.name] = _reason(error)
            else:
                done = progress.alone if contender is _ALONE else progress.samples.setdefault(contender.name, [])
                done.append(sample)
            progress.running = ""
            watch(progress)


def _fit(contender: Contender, spec: CompareSpec) -> None:
    if contender.peer and spec.compute == "sleep" and not others.find(contender.peer).sleeps:
        raise UserError("sleeping compute does not call the model's layers, which this peer needs; use --compute real")


def _reason(error: Exception) -> str:
    """One line: what the failing process said last."""
    return str(error).strip().splitlines()[0]


def _expected(spec: CompareSpec, progress: Progress, startup: float) -> dict[str, float]:
    """The time of one run by contender: starting, and for each step computing on shared cores and the wire."""
    assert progress.one_host is not None
    cores = os.cpu_count() or 1
    crowd = max(1.0, spec.hosts * progress.threads / cores)
    computing = progress.reference.one_host_s * (crowd if spec.compute == "real" else 1.0)
    specs = run_folder.model(progress.one_host.folder)
    rate = progress.payload_bytes_s
    found = {}
    for contender in (_ALONE, *spec.contenders):
        wire = contender.declared_bytes(specs, spec.hosts) / rate if rate else 0.0
        found[contender.name] = startup * crowd + spec.steps * (computing + wire)
    return found


def _result(spec: CompareSpec, progress: Progress, out: Path, began: str) -> dict[str, Any]:
    finished = {name: samples[0] for name, samples in progress.samples.items()}
    learns = spec.compute == "real"
    curves = {name: figures.curve(sample) for name, sample in finished.items()} if learns else {}
    timelines = {name: figures.timeline(sample.folder) for name, sample in finished.items()}
    every = [sample for samples in progress.samples.values() for sample in samples]
    references = [*progress.alone, *([progress.one_host] if progress.one_host else [])]
    others = [sample.other_cpu_share for sample in (*every, *references)]
    environment = run_folder.read_json(out / "one-host", "environment.json")
    machine = {
        "cores": environment["cores"],
        "threads": progress.threads,
        "system": environment["system"],
        "processor": _processor(),
        "cpu_share": statistics.mean(sample.cpu_share for sample in every) if every else None,
        "steal_share": statistics.mean(sample.steal_share for sample in every) if every else None,
        "other_cpu_share": statistics.mean(others) if others else None,
        "versions": environment["versions"],
    }
    result = {
        "job": find_job(spec.job).stem,
        "command": spec.command or spelled(spec),
        "compute": spec.compute,
        "steps": spec.steps,
        "warmup": Task(job=spec.job, steps=spec.steps).warmup(),
        "seeds": list(range(spec.seeds)),
        "target_loss": spec.target_loss,
        "target_held_out": spec.target_held_out,
        "date": began,
        "cluster": {
            "hosts": spec.hosts,
            "emulated": progress.emulated,
            "slow": list(spec.slow),
            "links": progress.links,
        },
        "machine": machine,
        "one_host": _one_host(progress),
        "interrupted": progress.interrupted,
        "rows": [row.to_json() for row in progress.rows()],
        "curves": {name: each for name, each in curves.items() if each},
        "timelines": {name: each for name, each in timelines.items() if each},
        "folder": str(out),
    }
    return {**result, "headline": headline(result)}


def _one_host(progress: Progress) -> dict[str, float] | None:
    one = progress.one_host
    if one is None:
        return None
    step_s = progress.reference.one_host_s
    spread_s = interquartile_range(one.steps_s)
    return {"step_s": step_s, "step_s_spread": spread_s, "samples_per_s": one.samples / step_s}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
