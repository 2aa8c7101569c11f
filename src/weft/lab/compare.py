"""The same job under several ways of distributing it, really run, side by side.

    result = weft.compare("wide", "bsp / ring", "bsp / ring / cast", peers=["ddp"], hosts=4, bandwidth="1gbit")
    result.rows;  result.report        # a notebook shows the report by itself

Runs are interleaved: every seed is one round through all contenders, every other round in reverse.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from weft.errors import UserError
from weft.lab import experiment, peers
from weft.lab.cluster import Cluster, Loopback, NoLabError
from weft.lab.experiment import Contender, Sample, Site, Task
from weft.lab.report import write_report
from weft.profile import Profile
from weft.runtime import folder as run_folder
from weft.runtime.launch import JobFailedError, find_job
from weft.runtime.pace import Slow
from weft.runtime.record import write_json
from weft.strategy import Strategy

DEFAULTS = (
    "bsp / ring / sequential",
    "bsp / ring",
    "bsp / ring / cast",
    "bsp / ring / error_feedback(topk(ratio=0.01))",
)
"""What is compared where nobody says what: nothing overlapped, overlapped, halved, made sparse."""

_ALONE = Contender(name="computing alone", peer="alone")
_SURVEY_STEPS = 10

Compute = Literal["real", "sleep"]
Links = Literal["emulated", "loopback", "auto"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to compare, and on what."""

    job: str
    args: tuple[str, ...] = ()
    contenders: tuple[Contender, ...]
    hosts: int = 4
    bandwidth: str = "1gbit"
    links: Mapping[int, str] = field(default_factory=dict)
    slow: tuple[str, ...] = ()
    compute: Compute = "real"
    profile: Profile | None = None
    """For sleeping compute; None: measured first."""
    steps: int = 30
    seeds: int = 2
    target_loss: float | None = None
    network: Links = "emulated"
    out: Path | None = None
    command: str = ""

    def checked(self) -> Request:
        find_job(self.job)
        names = [contender.name for contender in self.contenders]
        if not names:
            raise UserError("there is nothing to compare; name a strategy, a system or a peer")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"'{twice}' is named twice; name each contender once")
        if self.hosts < 2:
            raise UserError(f"--hosts is {self.hosts}, but comparing ways of distributing takes at least 2")
        if self.steps < 2 or self.seeds < 1:
            raise UserError("--steps must be at least 2 and --seeds at least 1")
        if self.compute not in ("real", "sleep"):
            raise UserError(f"--compute is '{self.compute}', but must be real or sleep")
        if self.network not in ("emulated", "loopback", "auto"):
            raise UserError(f"--links is '{self.network}', but must be emulated, loopback or auto")
        parse_slow(self.slow, self.hosts)
        for contender in self.contenders:
            if contender.strategy is not None:
                contender.strategy.check()
        return self


def parse_slow(items: Sequence[str], hosts: int) -> dict[int, Slow]:
    """`3=4x`, `all=4x@10%`: what each host named is slowed down by."""
    slow: dict[int, Slow] = {}
    for item in items:
        who, _, what = item.partition("=")
        if who != "all" and not (who.isdigit() and int(who) < hosts):
            raise UserError(
                f"--slow {item} names no host; write HOST=4x with a host from 0 to {hosts - 1}, or all=4x@10%"
            )
        for host in range(hosts) if who == "all" else [int(who)]:
            slow[host] = Slow.parse(what)
    return slow


@dataclass
class Board:
    """How far a comparison is, for whoever watches: what is done, and what runs."""

    request: Request
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
        return [self._row(contender) for contender in self.request.contenders]

    def _row(self, contender: Contender) -> dict[str, Any]:
        samples = self.samples.get(contender.name, [])
        kind = "peer" if contender.peer else "strategy"
        row: dict[str, Any] = {"name": contender.name, "kind": kind, "sentence": contender.sentence}
        if not samples:
            reason = self.errors.get(contender.name) or ("stopped before it ran" if self.interrupted else "not run yet")
            return row | dict.fromkeys(_FIGURES) | {"compute": self.request.compute, "error": reason}
        times = [seconds for sample in samples for seconds in sample.steps_s]
        step_s, middle = statistics.median(times), statistics.median
        alone = self.computing_alone()
        busy = middle(sample.busy_s for sample in samples)
        wire = middle(sample.wire_bytes_worker for sample in samples)
        rates = [link["payload_bytes_s"] for link in self.links]
        bound = max(self._computing_bound(alone, busy), wire / min(rates) if rates else 0.0)
        known = [sample.final_loss for sample in samples if sample.final_loss is not None]
        reached = [sample.time_to_target_s for sample in samples if sample.time_to_target_s is not None]
        counted = [sample.wire_bytes_link for sample in samples if sample.wire_bytes_link is not None]
        rate = samples[0].samples / step_s
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
        }
        return row | figures | {"compute": self.request.compute, "error": self.errors.get(contender.name)}

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
        filled = self.request.compute == "real" and self.request.hosts * self.threads >= cores
        if not filled or not self.alone:
            return alone
        extra = busy - statistics.median(sample.busy_s for sample in self.alone)
        return alone + max(0.0, extra) / cores


_FIGURES = (
    *("step_s", "step_s_spread", "samples_per_s", "speedup", "wire_bytes_worker", "wire_bytes_link", "exposed_s"),
    *("compute_s", "bound_s", "bound_share", "final_loss", "time_to_target_s"),
)


@dataclass(frozen=True)
class Comparison:
    """What a comparison found: its rows, its folder, its report."""

    result: dict[str, Any]
    folder: Path
    report: Path | None
    """The HTML file; None where it could not be drawn."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self.result["rows"])

    def _repr_html_(self) -> str:
        return self.report.read_text(encoding="utf-8") if self.report else f"<pre>{self.result['rows']}</pre>"


def compare(
    job: str,
    *strategies: str | Strategy | Mapping[str, str],
    peers: Sequence[str] = (),
    watch: Callable[[Board], None] = lambda _: None,
    **options: Any,
) -> Comparison:
    """Run `job` under each strategy and peer on an emulated cluster, and compare.

    A mapping names its strategies. `options` are the fields of `Request`: hosts, bandwidth, links, slow, compute,
    profile, steps, seeds, target_loss, network, out, args.
    """
    return conduct(Request(job=job, contenders=contenders(strategies, peers), **options).checked(), watch)


def contenders(strategies: Sequence[str | Strategy | Mapping[str, str]], names: Sequence[str]) -> tuple[Contender, ...]:
    found = []
    for each in strategies:
        if isinstance(each, Mapping):
            found += [Contender(name=name, strategy=Strategy.parse(text)) for name, text in each.items()]
        else:
            strategy = Strategy.parse(each) if isinstance(each, str) else each
            found.append(Contender(name=str(strategy), strategy=strategy))
    for name in names:
        peers.find(name)
        found.append(Contender(name=name, peer=name))
    return tuple(found)


def conduct(request: Request, watch: Callable[[Board], None]) -> Comparison:
    """Carry a comparison out. Interrupted, it keeps and reports what is finished."""
    out = _folder(request)
    fresh = not out.exists()
    board = Board(request)
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        with _site(request) as site:
            board.links, board.threads = [link.row() for link in site.links], site.threads
            board.emulated = isinstance(site, Cluster)
            _make(out)
            _runs(request, board, site, out, watch)
    except BaseException as error:
        board.interrupted = isinstance(error, KeyboardInterrupt)
        if not board.interrupted or not board.samples:
            _tidy(out, fresh)
            raise
    result = _result(request, board, out, began)
    write_json(out / "compare.json", result)
    try:
        report = write_report(result, out)
    except UserError:
        report = None
    if board.interrupted:
        watch(board)
    return Comparison(result, out, report)


@contextmanager
def _site(request: Request) -> Iterator[Site]:
    """The cluster, or plain processes where that was asked for or nothing else can be."""
    if request.network != "loopback":
        with ExitStack() as stack:
            try:
                cluster = stack.enter_context(Cluster(request.hosts, request.bandwidth, request.links))
            except NoLabError:
                if request.network == "emulated":
                    raise
            else:
                yield cluster
                return
    yield Loopback(request.hosts)


def _runs(request: Request, board: Board, site: Site, out: Path, watch: Callable[[Board], None]) -> None:
    """One host first, then rounds; computing alone is measured in every round, as one contender among others."""

    def once(contender: Contender, task: Task, seed: int, name: str, **more: Any) -> Sample:
        def on_event(event: dict[str, Any]) -> None:
            board.event = event
            watch(board)

        board.running, board.event = contender.name, {}
        watch(board)
        return experiment.run(task, site, contender, seed, out / name, on_event, **more)

    task = Task(job=request.job, args=request.args, steps=request.steps, target_loss=request.target_loss)
    profile_file = out / "profile.json"
    short = replace(task, steps=min(request.steps, _SURVEY_STEPS), profile=request.profile)
    started = time.monotonic()
    one = Contender(name="one host", strategy=Strategy())
    measured = None if request.profile else profile_file
    board.one_host = once(one, short, 0, "one-host", hosts=1, profile_to=measured)
    startup = time.monotonic() - started - short.steps * board.one_host_s()
    if request.compute == "sleep":
        board.profile = request.profile or Profile.read(profile_file)
        board.profile.write(profile_file)
    task = replace(task, slow=parse_slow(request.slow, request.hosts), profile=board.profile)
    board.expected_s = _expected(request, board, startup)
    watch(board)
    for seed in range(request.seeds):
        order = [_ALONE, *request.contenders]
        for contender in order if seed % 2 == 0 else reversed(order):
            if contender.name in board.errors:
                continue
            number = order.index(contender)
            try:
                _fit(contender, request)
                sample = once(contender, task, seed, f"{number:02d}-seed{seed}", trace=seed == 0)
            except (JobFailedError, UserError) as error:
                if contender is _ALONE:
                    raise
                board.errors[contender.name] = _reason(error)
            else:
                (board.alone if contender is _ALONE else board.samples.setdefault(contender.name, [])).append(sample)
            board.running = ""
            watch(board)


def _fit(contender: Contender, request: Request) -> None:
    if contender.peer and request.compute == "sleep" and not peers.find(contender.peer).sleeps:
        raise UserError("sleeping compute does not call the model's layers, which this peer needs; use --compute real")


def _reason(error: Exception) -> str:
    """One line: what the failing process said last."""
    return str(error).strip().splitlines()[0]


def _expected(request: Request, board: Board, startup: float) -> float:
    """How long it will take: starting, and for each step the larger of computing on shared cores and the wire."""
    assert board.one_host is not None
    cores = os.cpu_count() or 1
    crowd = max(1.0, request.hosts * board.threads / cores)
    computing = board.one_host_s() * (crowd if request.compute == "real" else 1.0)
    specs = run_folder.model(board.one_host.folder)
    rate = min((link["payload_bytes_s"] for link in board.links), default=None)
    total = 0.0
    for contender in (_ALONE, *request.contenders):
        wire = contender.declared_bytes(specs, request.hosts) / rate if rate else 0.0
        total += startup * crowd + request.steps * (computing + wire)
    return total * request.seeds


def _spread(times: list[float]) -> float:
    """The interquartile range."""
    if len(times) < 2:
        return 0.0
    quartiles = statistics.quantiles(times, n=4)
    return quartiles[2] - quartiles[0]


def _folder(request: Request) -> Path:
    """A new folder for the runs, the result and the report."""
    out = request.out
    if out is None:
        stem = find_job(request.job).stem
        numbers = (Path("runs") / f"compare-{stem}{'' if n == 1 else f'-{n}'}" for n in range(1, 100_000))
        out = next(folder for folder in numbers if not folder.exists())
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists and is not an empty folder; give a new one, results are not overwritten")
    return out.absolute()


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {error.strerror}; give another") from None


def _tidy(out: Path, fresh: bool) -> None:
    """A folder that was made for a comparison without a single row goes away with it."""
    if fresh:
        shutil.rmtree(out, ignore_errors=True)
        if out.parent == Path("runs").absolute() and out.parent.is_dir() and not any(out.parent.iterdir()):
            out.parent.rmdir()


def _result(request: Request, board: Board, out: Path, began: str) -> dict[str, Any]:
    finished = {name: samples[0] for name, samples in board.samples.items()}
    learns = request.compute == "real"
    curves = {name: experiment.curve(sample) for name, sample in finished.items()} if learns else {}
    timelines = {name: experiment.timeline(sample.folder) for name, sample in finished.items()}
    every = [sample for samples in board.samples.values() for sample in samples]
    environment = run_folder.read_json(out / "one-host", "environment.json")
    machine = {
        "cores": environment["cores"],
        "threads": board.threads,
        "system": environment["system"],
        "processor": _processor(),
        "cpu_share": statistics.mean(sample.cpu_share for sample in every) if every else None,
        "steal_share": statistics.mean(sample.steal_share for sample in every) if every else None,
        "versions": environment["versions"],
    }
    one = board.one_host
    return {
        "job": find_job(request.job).stem,
        "command": request.command or _spelled(request),
        "compute": request.compute,
        "steps": request.steps,
        "warmup": Task(job=request.job, steps=request.steps).warmup(),
        "seeds": list(range(request.seeds)),
        "target_loss": request.target_loss,
        "date": began,
        "cluster": {
            "hosts": request.hosts,
            "emulated": board.emulated,
            "slow": list(request.slow),
            "links": board.links,
        },
        "machine": machine,
        "one_host": {"step_s": board.one_host_s(), "samples_per_s": one.samples / board.one_host_s()} if one else None,
        "interrupted": board.interrupted,
        "rows": board.rows(),
        "curves": {name: each for name, each in curves.items() if each},
        "timelines": {name: each for name, each in timelines.items() if each},
        "folder": str(out),
    }


def _spelled(request: Request) -> str:
    """The command that would do the same."""
    words = ["weft", "compare", request.job]
    words += [str(contender.strategy) for contender in request.contenders if contender.strategy is not None]
    named = ",".join(contender.peer for contender in request.contenders if contender.peer)
    words += ["--peers", named] if named else []
    words += ["--hosts", str(request.hosts), "--bandwidth", request.bandwidth]
    for host, rate in request.links.items():
        words += ["--link", f"{host}={rate}"]
    for each in request.slow:
        words += ["--slow", each]
    words += ["--compute", request.compute, "--steps", str(request.steps), "--seeds", str(request.seeds)]
    words += ["--target-loss", str(request.target_loss)] if request.target_loss is not None else []
    words += ["--links", request.network] if request.network != "emulated" else []
    return shlex.join([*words, *(["--", *request.args] if request.args else [])])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
