"""`weft train`: run a job under a strategy."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from weft import systems
from weft.cli import _options as options
from weft.cli import app
from weft.cli._cluster import BandwidthOption, LinkOption, SlowOption, parse_links
from weft.cli._command import Command
from weft.cli._effects import check_machine_options, check_train_options
from weft.cli._resume import Resumption, hold_for_resume, hold_launch, stopped
from weft.cli._show import JsonOption, console, emit, table
from weft.cli._strategy import parse_strategy
from weft.errors import JobError, UserError
from weft.lab import child as lab_child
from weft.lab.cluster import Cluster
from weft.lab.spec import parse_slow
from weft.lab.trial import slow_seat
from weft.runtime.launch.launcher import find_job, launch
from weft.runtime.launch.network import parse_network
from weft.runtime.launch.spec import Launch, Seat
from weft.runtime.launch.strategy_source import COMMAND_LINE, DEFAULT, winner
from weft.runtime.launch.supervise import JobFailedError, Terminated
from weft.runtime.record.describe import describe_launch
from weft.runtime.record.new_folder import folder_name, folders_named, new_folder, remove_folder
from weft.runtime.record.run_folder import asynchrony, step_limit, summary
from weft.store.checkpoint import Policy, found_in
from weft.strategy import Strategy
from weft.units import bytes_text

_PLAIN_EVERY_S = 2.0


@app.command(cls=Command)
def train(
    context: typer.Context,
    job: options.Job = None,
    args: options.Args = None,
    strategy: options.StrategyText = None,
    system: options.System = None,
    steps: options.Steps = None,
    seed: options.Seed = None,
    workers: options.Workers = None,
    processes: options.Processes = None,
    device: options.Device = "auto",
    share_gpus: options.ShareGpus = False,
    nodes: options.Nodes = 1,
    node_rank: options.NodeRank = 0,
    rendezvous: options.Rendezvous = "",
    network: options.NetworkText = "untrusted",
    key_file: options.KeyFile = None,
    join: options.Join = 0,
    hosts: options.Hosts = None,
    bandwidth: BandwidthOption = "1gbit",
    link: LinkOption = None,
    slow: SlowOption = None,
    save_every: options.SaveEvery = None,
    keep_last: options.KeepLast = 2,
    keep_every: options.KeepEvery = 0,
    resume: options.Resume = None,
    grace: options.Grace = 30.0,
    out: options.Out = None,
    trace: options.Trace = False,
    json: JsonOption = None,
) -> None:
    """Train a job on several workers, and record the run in a folder."""
    show = console(json)
    given = Launch(
        job=job or "",
        args=tuple(args or ()),
        workers=workers if workers is not None else hosts or 1,
        processes=processes if hosts is None else hosts,
        nodes=nodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
        key_file=key_file,
        external_ranks=join,
        network=parse_network(network),
        strategy=_strategy(strategy, system, show),
        strategy_source=f"the system {system}" if system is not None else COMMAND_LINE,
        steps=steps,
        seed=seed,
        device=device,
        trace=trace,
        share_gpus=share_gpus,
        policy=_policy(save_every, keep_last, keep_every),
        grace_s=grace,
        module=lab_child.MODULE if hosts or slow else Launch.module,
    )
    site = partial(_site, hosts, bandwidth, link, slow, processes, nodes)
    _report(_run(context, given, site, show, workers=workers, resume=resume, out=out), show, json)


def _report(row: dict[str, Any] | None, show: Console, json: str | None) -> None:
    """The summary of a run, on the machine that has it."""
    if row is not None:
        emit(row | {"rows": [row]}, json)
        _print_summary(show, row)


def _run(
    context: typer.Context,
    given: Launch,
    site: Callable[[tuple[int, ...]], AbstractContextManager[tuple[Seat, ...]]],
    show: Console,
    *,
    workers: int | None,
    resume: Path | None,
    out: Path | None,
) -> dict[str, Any] | None:
    """Start or resume a run with the options of the command line. Returns its summary, on the machine that has it."""
    check_train_options(context)
    began = time.localtime()
    with ExitStack() as held:
        if resume is not None:
            if given.node_rank == 0 and out is None:
                held.enter_context(hold_for_resume(resume))
            again = Resumption.of(given, resume, workers)
            if again.finished:
                return _finished(again, show)
            again.announce(show)
            given = again.launch
        elif not given.job:
            raise UserError("nothing to train: give a job, as in `weft train text -n 2`, or --resume RUN")
        path = find_job(given.job)
        source, strategy = (given.strategy_source, given.strategy) if given.strategy else winner(None, path)
        server_hosts = strategy.check().server_hosts(given.workers)
        check_machine_options(context, servers=bool(server_hosts))
        survives = strategy.survives_worker_loss
        spec = replace(given, servers=len(server_hosts), survives_worker_loss=survives).checked()
        made = False
        if given.out is None or out is not None:
            folder, made = _folder(out, folder_name(path.stem, began, str(strategy)), given.node_rank)
            spec = replace(spec, out=folder)
            if given.node_rank == 0:
                held.enter_context(hold_launch(folder))
        several = f"{spec.workers} worker{'s' * (spec.workers != 1)}"
        show.print(f"{path.stem}: {several}" + (f", {strategy}" if source != DEFAULT else ""))
        row = _trained(spec, site(server_hosts), show, made)
    if row is not None and made and out is None and row["strategy"] != str(strategy):  # the job itself set the strategy
        renamed, _ = new_folder(None, folder_name(path.stem, began, row["strategy"]))
        row["folder"] = str(Path(row["folder"]).rename(renamed))
    return row


def _finished(again: Resumption, show: Console) -> dict[str, Any]:
    """The summary of a run that has taken all of its steps, without starting it."""
    more = f"weft train --resume {shlex.quote(str(again.run))} --steps {2 * again.step}"
    limit = step_limit(again.run)
    if limit is None or again.step < limit:
        loop = "the job's loop has ended; to train on, give it more epochs or data"
        show.print(f"{loop}, and a larger number of steps: {more}", markup=False)
    else:
        show.print(f"all {again.step} steps are done; to train on, give a larger number: {more}", markup=False)
    return summary(again.run)


def _trained(
    spec: Launch, site: AbstractContextManager[tuple[Seat, ...]], show: Console, made: bool
) -> dict[str, Any] | None:
    """Run the job to its end. Returns the summary on the machine that has it, else None."""
    folder = spec.out or Path()
    try:
        if spec.node_rank == 0:
            describe_launch(folder, spec)
        with _Bar(show, spec.steps) as bar, site as seats:
            launch(replace(spec, seats=seats), bar.line, bar.progress)
        if spec.node_rank > 0:
            return None
        row = summary(folder)
        describe_launch(folder, spec, finished=True)
        return row
    except (UserError, JobFailedError):
        _tidy(folder, made)
        raise
    except Terminated as error:
        said = stopped(folder, error)
        _tidy(folder, made)
        raise Terminated(said, error.number) from None
    except (KeyboardInterrupt, SystemExit) as error:  # outside of `attend`; SIGTERM exits
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        said = stopped(folder, Terminated("it was not training", number))
        _tidy(folder, made)
        raise Terminated(said, number) from None


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


def _strategy(strategy: str | None, system: str | None, show: Console) -> Strategy | None:
    if strategy is not None and system is not None:
        raise UserError("--strategy and --system both name a strategy; give only one of them")
    if system is None:
        return parse_strategy(strategy) if strategy is not None else None
    named, found = systems.find(system), systems.strategy(system)
    if named.status == "partly":
        show.print(f"{named.name} runs in part: {named.missing}", markup=False)
    return found


def _policy(every: int | None, last: int, milestone: int) -> Policy | None:
    """The policy of the command line; None: the job decides."""
    if every is not None:
        return Policy(every=every, last=last, milestone=milestone)
    return Policy(last=last, milestone=milestone) if (last, milestone) != (2, 0) else None


def _folder(out: Path | None, name: str, node_rank: int) -> tuple[Path, bool]:
    """The folder of a new run, and whether it was made here: node 0 makes it."""
    if node_rank > 0:
        return out or next(folder for folder in folders_named(name) if not folder.exists()), False
    return new_folder(out, name)


def _tidy(folder: Path, made: bool) -> None:
    """Remove a folder that was made for a run without a single step."""
    if not made or not folder.is_dir() or found_in(folder / "checkpoints"):
        return
    if not any(file.stat().st_size for file in folder.glob("events-*.jsonl")):
        remove_folder(folder)


def _print_summary(show: Console, row: dict[str, Any]) -> None:
    spread = f"{row['step_s'] * 1e3:.1f} ms (interquartile range {row['step_s_spread'] * 1e3:.1f})"
    lines = [("step", spread), ("samples/s", f"{row['samples_per_s']:.1f}")]
    lines += [("sent by a worker per step", bytes_text(row["wire_bytes_worker"]))]
    if row["final_loss"] is not None:
        lines.append(("final loss", f"{row['final_loss']:.4f}"))
    lines += [(key.replace("_", " "), f"{value:.4f}") for key, value in row.get("report", {}).items()]
    lines += _about_merges(row) + _about_servers(row.get("servers", []))
    lines.append(("folder", row["folder"]))
    table(show, [f"{row['steps']} step{'s' * (row['steps'] != 1)}", ""], lines)


def _about_merges(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Under local optimizers: how often models were merged, at what price, and how far apart they were."""
    if "merges" not in row:
        return []
    lines = [("merges", f"{row['merges']}, which held the loop up for {row['merge_s']:.2f} s")]
    if row["consensus"] is not None:
        lines.append(("distance of models at the last merge", f"{row['consensus']:.2g} of the anchor's norm"))
    return lines


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
