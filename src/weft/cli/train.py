"""`weft train`: run a job under a strategy."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from weft import jobs, systems
from weft.cli import app
from weft.cli._cluster import BandwidthOption, LinkOption, SlowOption, parse_links
from weft.cli._show import JsonOption, console, emit, table
from weft.errors import JobError, UserError
from weft.lab import child as lab_child
from weft.lab.cluster import Cluster
from weft.lab.spec import parse_slow
from weft.lab.trial import slow_seat
from weft.runtime.launch.launcher import find_job, launch
from weft.runtime.launch.spec import Launch, Seat
from weft.runtime.launch.strategy_source import DEFAULT, winner
from weft.runtime.launch.supervise import JobFailedError, Terminated
from weft.runtime.record.describe import describe_launch, launched
from weft.runtime.record.files import hold, writing
from weft.runtime.record.run_folder import asynchrony, summary
from weft.store.checkpoint import Policy, found_in, newest, recover, verify
from weft.strategy import Strategy
from weft.units import bytes_text

_PLAIN_EVERY_S = 2.0


@app.command(context_settings={"allow_interspersed_args": True})
def train(
    job: Annotated[
        str | None, typer.Argument(help="A script, or a bundled job: text, wide, vision; not needed with --resume.")
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the job, after --.")] = None,
    workers: Annotated[
        int | None,
        typer.Option("-n", "--workers", help="Total number of logical workers; 1 by default, or one per host."),
    ] = None,
    strategy: Annotated[str | None, typer.Option(help='Strategy, as in "bsp / ring / wfbp", or @file.toml.')] = None,
    system: Annotated[str | None, typer.Option(help="Strategy of a surveyed system (see `weft systems`).")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of optimizer steps to stop after.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of torch, numpy, random and the data order.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; a new one in runs/ by default.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    processes: Annotated[
        int | None, typer.Option(help="Number of processes that carry the workers; one per worker by default.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="Number of machines.")] = 1,
    node_rank: Annotated[int, typer.Option(help="Number of this machine, from 0.")] = 0,
    rendezvous: Annotated[str, typer.Option(metavar="HOST:PORT", help="Rendezvous of the machines, on node 0.")] = "",
    key_file: Annotated[
        Path | None, typer.Option(help="Key for parameter servers on several machines (see `weft key`).")
    ] = None,
    join: Annotated[
        int,
        typer.Option(help="Number of processes (the highest ranks) that will be started elsewhere with `weft join`."),
    ] = 0,
    network: Annotated[
        str, typer.Option(help="Network between machines: trusted, or untrusted, which encrypts all traffic.")
    ] = "untrusted",
    share_gpus: Annotated[
        bool, typer.Option("--share-gpus", help="Several processes share one GPU, with Gloo.")
    ] = False,
    hosts: Annotated[int | None, typer.Option(help="Number of emulated hosts, each with its own link.")] = None,
    bandwidth: BandwidthOption = "1gbit",
    link: LinkOption = None,
    slow: SlowOption = None,
    trace: Annotated[bool, typer.Option("--trace", help="Write a trace for ui.perfetto.dev.")] = False,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; 500 by default, 0 for no checkpoints.")
    ] = None,
    keep_last: Annotated[int, typer.Option(help="Number of latest checkpoints to keep.")] = 2,
    keep_every: Annotated[int, typer.Option(help="Keep checkpoints at multiples of this many steps for good.")] = 0,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Resume a run from its latest complete checkpoint.")
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds to save and exit after SIGTERM.")] = 30.0,
    json: JsonOption = None,
) -> None:
    """Train JOB on several workers under a strategy, and record the run in a folder."""
    show = console(json)
    chosen = _strategy(strategy, system)
    if system is not None and (named := systems.find(system)).status == "partly":
        show.print(f"{named.name} runs in part: {named.note}", markup=False)
    policy = Policy(every=save_every, last=keep_last, milestone=keep_every) if save_every is not None else None
    if policy is None and (keep_last, keep_every) != (2, 0):
        policy = Policy(last=keep_last, milestone=keep_every)
    asked = Launch(
        job=job or "",
        args=tuple(args or ()),
        workers=workers if workers is not None else hosts or 1,
        processes=processes if hosts is None else hosts,
        nodes=nodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
        key_file=key_file,
        external_ranks=join,
        network=network,
        strategy=chosen,
        steps=steps,
        seed=seed,
        device=device,
        trace=trace,
        share_gpus=share_gpus,
        policy=policy,
        grace_s=grace,
        module=lab_child.MODULE if slow else Launch.module,
    )
    with ExitStack() as held:
        if resume is not None:
            if node_rank == 0 and out is None:
                _hold_whole(held, _run_of(resume))
            asked = go_on(asked, resume, {"workers": workers, "args": args}, show)
        elif job is None:
            raise UserError("nothing to train: give a job, as in `weft train text -n 2`, or --resume RUN")
        path = find_job(asked.job)
        source, known = ("the command line", asked.strategy) if asked.strategy else winner(None, path)
        server_hosts = known.check().server_hosts(asked.workers)
        spec = replace(asked, servers=len(server_hosts), survives_worker_loss=known.survives_worker_loss).checked()
        made = False
        if asked.out is None or out is not None:
            folder, made = _folder(out, path, known, node_rank)
            spec = replace(spec, out=folder)
            if node_rank == 0:
                held.enter_context(_held(folder))
        several = f"{spec.workers} worker{'s' * (spec.workers != 1)}"
        show.print(f"{path.stem}: {several}" + (f", {known}" if source != DEFAULT else ""))
        site = _site(hosts, bandwidth, link, slow, processes, nodes, server_hosts)
        row = _trained(spec, site, show, path, made)
    if row is None:
        return
    if made and out is None and row["strategy"] != str(known):  # the job itself set the strategy; rename the folder
        folder = Path(row["folder"])
        row["folder"] = str(folder.rename(_folder(None, path, Strategy.parse(row["strategy"]))[0]))
    emit(row | {"rows": [row]}, json)
    _print_summary(show, row)


def _trained(
    spec: Launch, site: AbstractContextManager[tuple[Seat, ...]], show: Console, job: Path, made: bool
) -> dict[str, Any] | None:
    """Run the job to its end. Returns the summary on the machine that has it, else None."""
    folder = spec.out or Path()
    try:
        if spec.node_rank == 0:
            describe_launch(folder, spec)
        with _Bar(show, spec.steps) as bar, site as seats:
            launch(replace(spec, seats=seats), bar.line, bar.progress)
        return summary(folder) if spec.node_rank == 0 else None
    except (UserError, JobFailedError):
        _tidy(folder, made)
        raise
    except Terminated as error:
        there = found_in(folder / "checkpoints")
        remedy = f"; resume with `weft train --resume {folder}`" if there else ""
        _tidy(folder, made)
        raise Terminated(f"{job.stem} was {error}{remedy}") from None


def _held(folder: Path) -> IO[bytes]:
    """Lock a run folder, so that a running run cannot be resumed at the same time."""
    with writing(folder):
        return hold(folder, "launch")


def _hold_whole(held: ExitStack, run: Path) -> None:
    """Lock a run that is to be resumed, and recover a checkpoint that was being replaced."""
    launched(run)
    held.enter_context(_held(run))
    with writing(run), hold(run, "run"):
        recover(run / "checkpoints")


def _run_of(resume: Path) -> Path:
    """The run folder, given it or one of its checkpoints."""
    return resume.absolute().parent.parent if (resume / "manifest.json").exists() else resume


@contextmanager
def _site(
    hosts: int | None,
    bandwidth: str,
    link: list[str] | None,
    slow: list[str] | None,
    processes: int | None,
    nodes: int,
    server_hosts: tuple[int, ...],
) -> Iterator[tuple[Seat, ...]]:
    """The seats of the processes: on an emulated cluster if --hosts is given, else on this machine."""
    if hosts is None:
        if link or slow:
            raise UserError("--link and --slow are for an emulated cluster; add --hosts")
        yield ()
        return
    if processes not in (None, hosts) or nodes != 1:
        raise UserError("--hosts gives each host one process; leave --processes and --nodes out")
    slowed = parse_slow(slow or (), hosts)
    with Cluster(max(hosts, *(home + 1 for home in server_hosts), 1), bandwidth, parse_links(link)) as cluster:
        before = cluster.counters()
        seats = cluster.seats(range(hosts))
        yield (*(slow_seat(seat, slowed.get(host)) for host, seat in enumerate(seats)), *cluster.seats(server_hosts))
        after = cluster.counters()
        if hosts > 1 and after == before:
            raise JobError("no traffic crossed the emulated links: the run bypassed them; run without --hosts")


def go_on(asked: Launch, resume: Path, said: dict[str, Any], show: Console) -> Launch:
    """The same run, resumed from its latest complete checkpoint; options on the command line take precedence."""
    run = _run_of(resume)
    before = launched(run)
    path = find_job(before.job)
    if asked.job and find_job(asked.job).resolve() != path.resolve():
        raise UserError(f"{run} is a run of {before.job}, not of {asked.job}; omit the job, or start a new run")
    if not asked.job:
        _check_trusted(before.job, path, run)
    alone = run != resume
    checkpoint, manifest, refused = (resume, verify(resume), []) if alone else newest(run / "checkpoints")
    for what in refused:
        show.print(f"{what}; it is skipped", markup=False)
    show.print(f"resuming after step {manifest.step}, from {checkpoint}", markup=False)
    show.print(f"the job is {' '.join([str(path), *(said['args'] or before.args)])}", markup=False)
    steps = asked.steps if asked.steps is not None else before.steps
    if steps is not None and manifest.step >= steps:
        show.print(f"all {steps} steps are done; give a larger --steps to train on", markup=False)
    workers = said["workers"] or before.workers
    processes = asked.processes if asked.processes is not None else before.processes
    if said["workers"] and asked.processes is None:
        processes = None
    return replace(
        asked,
        job=before.job,
        args=tuple(said["args"] or before.args),
        workers=workers,
        processes=processes,
        strategy=asked.strategy or Strategy.parse(manifest.strategy),
        steps=steps,
        seed=before.seed if asked.seed is None else asked.seed,
        device=asked.device if asked.device != "auto" else before.device,
        share_gpus=asked.share_gpus or before.share_gpus,
        policy=asked.policy or before.policy,
        out=run,
        resume=checkpoint.absolute(),
    )


def _check_trusted(job: str, path: Path, run: Path) -> None:
    """Refuse to run a script that only the run folder names and that another user may have put there."""
    inside = path.resolve().is_relative_to(run.resolve())
    if jobs.path(job) is None and (inside or path.stat().st_uid != os.geteuid()):
        why = "lies in the run folder" if inside else "belongs to another user"
        raise UserError(
            f"{run / 'launch.json'} names the job {path}, which {why}; if you trust it, name it yourself: "
            f"weft train {path} --resume {run}"
        )


def _strategy(strategy: str | None, system: str | None) -> Strategy | None:
    if strategy is not None and system is not None:
        raise UserError("--strategy and --system both name a strategy; give only one of them")
    if system is not None:
        return systems.strategy(system)
    return Strategy.parse(strategy) if strategy is not None else None


def _folder(out: Path | None, job: Path, strategy: Strategy, node_rank: int = 0) -> tuple[Path, bool]:
    """The folder given with --out, if it holds no run yet, or a new one in runs/; and whether it was made here."""
    if out is not None:
        if node_rank > 0:
            return out, False
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"--out {out} exists and is not an empty folder; give a new one, runs are not overwritten")
        return out, _made(out)
    name = f"{job.stem}-{strategy.digest}"
    numbers = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in range(1, 100_000))
    if node_rank > 0:
        return next(folder for folder in numbers if not folder.exists()), False
    return next(folder for folder in numbers if _made(folder)), True


def _made(folder: Path) -> bool:
    """Make a folder. Returns whether this call made it, so that two runs never share one."""
    with writing(folder):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            return False
    return True


def _tidy(folder: Path, made: bool) -> None:
    """Remove a folder that was made for a run without a single step."""
    if not made or not folder.is_dir() or found_in(folder / "checkpoints"):
        return
    if any(file.stat().st_size for file in folder.glob("events-*.jsonl")):
        return
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent == Path("runs"):
        with suppress(OSError):  # other runs are in it
            folder.parent.rmdir()


def _print_summary(show: Console, row: dict[str, Any]) -> None:
    spread = f"{row['step_s'] * 1e3:.1f} ms (interquartile range {row['step_s_spread'] * 1e3:.1f})"
    lines = [("step", spread), ("samples/s", f"{row['samples_per_s']:.1f}")]
    lines += [("sent by a worker per step", bytes_text(row["wire_bytes_worker"]))]
    if row["final_loss"] is not None:
        lines.append(("final loss", f"{row['final_loss']:.4f}"))
    lines += [(key.replace("_", " "), f"{value:.4f}") for key, value in row.get("report", {}).items()]
    lines += _about_servers(row.get("servers", []))
    lines.append(("folder", row["folder"]))
    table(show, [f"{row['steps']} steps", ""], lines)


def _about_servers(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The staleness of gradients, and the longest wait of a worker."""
    if not rows:
        return []
    seen = asynchrony(rows)
    lines = [("busiest server, in and out", bytes_text(seen["server_bytes"]))]
    if seen["staleness_mean"] is not None:
        lines.append(
            ("staleness, updates", f"{seen['staleness_mean']:.2f} on average, {seen['staleness_most']} at most")
        )
    if seen["longest_wait"] is not None:
        who, on, seconds = seen["longest_wait"]
        lines.append(("waited most", f"worker {who}, {seconds:.1f} s" + (f" for worker {on}" if on != who else "")))
    return lines


class _Bar:
    """Progress: a bar on a terminal, plain lines elsewhere; lines of the workers carry their rank."""

    def __init__(self, show: Console, steps: int | None) -> None:
        self.show, self.steps, self.told = show, steps, 0.0
        self.bar = Progress(
            TextColumn("step {task.fields[at]}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=show,
            disable=not show.is_terminal,
        )
        self.task = self.bar.add_task("starting", total=steps, at=0)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def line(self, rank: int, text: str) -> None:
        self.show.print(f"[{rank}] {text}", markup=False)

    def progress(self, event: dict[str, Any]) -> None:
        step_s = event["step_s"] or 1e-9
        loss = f"loss {event['loss']:.4f}, " if isinstance(event.get("loss"), float) else ""
        rates = f"{event['samples'] * event['workers'] / step_s:.0f} samples/s, "
        rates += f"{bytes_text(event['wire_bytes'] / step_s)}/s"
        of = f"/{event['steps']}" if event["steps"] else ""
        if self.show.is_terminal:
            known = {"completed": event["step"], "total": event["steps"], "description": loss + rates}
            self.bar.update(self.task, at=f"{event['step']}{of}", **known)
        elif time.monotonic() - self.told > _PLAIN_EVERY_S:
            self.told = time.monotonic()
            left = f", {(event['steps'] - event['step']) * step_s:.0f} s left" if event["steps"] else ""
            self.show.print(f"step {event['step']}{of}: {loss}{rates}{left}", markup=False)
