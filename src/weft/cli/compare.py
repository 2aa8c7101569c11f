"""`weft compare`: run the same job under several strategies, side by side."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from weft import systems
from weft.cli import _compare_options as options
from weft.cli import app
from weft.cli._cluster import BandwidthOption, LinkOption, SlowOption, parse_links
from weft.cli._command import Command
from weft.cli._effects import refuse
from weft.cli._forecast import Forecast
from weft.cli._show import JsonOption, console, emit
from weft.cli._strategy import parse_strategy
from weft.errors import UserError
from weft.lab import learning
from weft.lab.compare import Comparison, conduct
from weft.lab.contender import Contender
from weft.lab.progress import Progress
from weft.lab.rows import Row, by_step, one_host_row, rows_of
from weft.lab.spec import CompareSpec, contenders
from weft.lab.verdict import remarks
from weft.lab.words import ms
from weft.profile import Profile
from weft.runtime.launch.supervise import Terminated
from weft.strategy import Strategy
from weft.units import bytes_text

MISSING = "–"


class _WithJob(Command):
    """A command that passes all words after -- to the job, whatever they look like."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["job"] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


@app.command(cls=_WithJob)
def compare(
    context: typer.Context,
    job: options.Job,
    strategies: options.Strategies = None,
    system: options.Systems = None,
    group: options.Group = None,
    peers: options.Peers = "",
    hosts: options.Hosts = 4,
    bandwidth: BandwidthOption = "1gbit",
    link: LinkOption = None,
    slow: SlowOption = None,
    links: options.Links = "emulated",
    compute: options.Compute = "real",
    profile: options.Durations = None,
    steps: options.Steps = 30,
    seeds: options.Seeds = 2,
    target_loss: options.TargetLoss = None,
    target_held_out: options.TargetHeldOut = None,
    out: options.Out = None,
    json: JsonOption = None,
) -> None:
    """Compare strategies side by side on an emulated cluster."""
    show = console(json)
    named = [name.strip() for name in peers.split(",") if name.strip()]
    published = _systems(system or [], group)
    chosen = [parse_strategy(each) for each in strategies or ()]
    if links == "loopback":
        refuse(context, ("bandwidth",), "with --links loopback, which shapes no links; omit one of them")
    if profile is not None and compute != "sleep":
        raise UserError("--profile is for --compute sleep; omit it, or add --compute sleep")
    spec = CompareSpec(
        job=job,
        args=tuple(context.meta["job"]),
        contenders=(*published, *contenders(chosen, named, defaults=not published)),
        hosts=hosts,
        bandwidth=bandwidth,
        links=parse_links(link),
        slow=tuple(slow or ()),
        compute=compute,  # type: ignore[arg-type]
        profile=Profile.read(profile) if profile is not None else None,
        steps=steps,
        seeds=seeds,
        target_loss=target_loss,
        target_held_out=target_held_out,
        network=links,  # type: ignore[arg-type]
        out=out,
        command=shlex.join(["weft", *sys.argv[1:]]),
    ).checked()
    try:
        with _Watch(show) as watch:
            found = conduct(spec, watch)
    except KeyboardInterrupt:
        raise Terminated("stopped before the first run was finished; nothing was kept", signal.SIGINT) from None
    emit(found.result, json)
    _print_results(show, found)
    if found.result["interrupted"]:
        raise Terminated(f"stopped; finished runs and the report are kept in {found.folder}", signal.SIGINT)


def _print_results(show: Console, found: Comparison) -> None:
    """The table, the errors and remarks, the location of the report, and the headline."""
    result = found.result
    rows, alone = rows_of(result), one_host_row(result)
    show.print(_table([*rows, *([alone] if alone else [])], show.width))
    for row in rows:
        if row.error is not None:
            show.print(f"{row.name}: {row.error}", markup=False)
    own = f" (its own step: {ms(result['one_host']['step_s'])} ms)" if alone else ""
    show.print(
        f"\none host alone: the time for as many samples{own}" if alone else "\none host alone: not measured", end="; "
    )
    show.print(f"{result['compute']} compute on {result['machine']['cores']} cores")
    show.print(f"report: {found.report}" if found.report else "report: needs matplotlib; run `pip install matplotlib`")
    for remark in remarks(result):
        show.print(remark, markup=False, style="yellow")
    show.print(f"\n{result['headline']}", markup=False, style="bold")


def _systems(names: list[str], group: str | None) -> list[Contender]:
    """Systems as contenders; systems with the same strategy share one contender."""
    chosen = [systems.find(name) for name in names]
    if group == "survey4":
        chosen += [systems.find(name) for name in systems.SURVEY4]
    elif group is not None:
        known = {each.group for each in systems.catalogue()}
        members = [each for each in systems.catalogue() if each.group == group and each.strategy]
        if not members:
            what = "has no system that runs yet" if group in known else "is not a group"
            raise UserError(f"--systems: '{group}' {what}; choose one of {', '.join(_groups())}")
        chosen += members
    by_strategy: dict[str, list[str]] = {}
    for each in chosen:
        ids = by_strategy.setdefault(str(systems.strategy(each.id)), [])
        ids += [each.id] if each.id not in ids else []
    return [
        Contender(name=f"{', '.join(ids)} ({text})", strategy=Strategy.parse(text)) for text, ids in by_strategy.items()
    ]


def _groups() -> list[str]:
    return sorted({each.group for each in systems.catalogue() if each.strategy} | {"survey4"})


class _Watch:
    """A live table on a terminal; elsewhere one line for each finished run."""

    def __init__(self, show: Console) -> None:
        self.show, self.done = show, 0
        self.said: set[str] = set()
        self.live = Live(console=show, refresh_per_second=2, transient=True) if show.is_terminal else None
        self.forecast = Forecast()

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, progress: Progress) -> None:
        self.forecast.see(progress, time.monotonic())
        if not progress.emulated:
            self._say("hosts are processes on loopback, links are not shaped")
        self._say("one host alone, to measure its step time …")
        if self.live is not None:
            self.live.update(self._picture(progress))
        else:
            self._lines(progress)

    def _say(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            self.show.print(text)

    def _lines(self, progress: Progress) -> None:
        done = sum(len(samples) for samples in progress.samples.values()) + len(progress.errors) + len(progress.alone)
        if done > self.done and not progress.running:
            if not self.done:
                runs = (len(progress.spec.contenders) + 1) * progress.spec.seeds
                total = self.forecast.elapsed_s + self.forecast.left_s
                self.show.print(f"expected: about {_duration(total)} for {runs} runs of {progress.spec.steps} steps")
            self.done = done
            self.show.print(f"{done} run{'s' * (done > 1)} done{self._left()}")

    def _left(self) -> str:
        seconds = self.forecast.left_s
        return f", about {_duration(seconds)} left" if seconds >= 1 else ""

    def _picture(self, progress: Progress) -> Table:
        table = _table(progress.rows(), self.show.width)
        event = progress.event
        at = f"step {event['step']}/{event['steps']}" if event else "starting"
        table.caption = escape(f"{progress.running}: {at}{self._left()}" if progress.running else self._left()[2:])
        return table


def _table(rows: Sequence[Row], width: int) -> Table:
    """The rows as a terminal table, fastest first, with as many columns as fit beside the names."""
    names = min(max(len(row.name) for row in rows), max(20, width // 3))
    left = width - names
    filled = [column for column in _columns(rows) if any(column[1](row) != MISSING for row in rows)]
    chosen = [column for column in filled if (left := left - len(column[0]) - 2) >= 0]
    table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left")
    table.add_column("", overflow="fold", min_width=names)
    for head, _ in chosen:
        table.add_column(head, justify="right", no_wrap=True)
    for row in by_step(rows):
        cells = [text(row) for _, text in chosen] if row.step_s is not None else [MISSING]
        table.add_row(escape(row.name), *cells)
    return table


def _columns(rows: Sequence[Row]) -> list[tuple[str, Callable[[Row], str]]]:
    """The heading and the cell of each column, most important first."""
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("    step ms", lambda row: f"{_ms(row.step_s)} ± {_ms(row.step_s_spread)}"),
        ("held-out loss", lambda row: learning.text(row.learning).removesuffix(" held-out loss")),
        ("speed-up", lambda row: _text(row.speedup, "{:.2f}".format)),
        ("of bound", lambda row: _text(row.bound_share, "{:.0%}".format)),
        ("    sent", lambda row: _text(row.wire_bytes_worker, bytes_text)),
        (" loss", lambda row: _text(row.final_loss, "{:.3f}".format)),
        ("final held-out", lambda row: _text(row.held_out_loss, "{:.3f}".format)),
        ("merges", lambda row: _text(row.merges, str)),
        ("merge s", lambda row: _text(row.merge_s, "{:.1f}".format)),
        ("consensus", lambda row: _text(row.consensus, "{:.2g}".format)),
        ("samples/s", lambda row: _text(row.samples_per_s, "{:.1f}".format)),
        ("bound ms", lambda row: _ms(row.bound_s)),
        ("exposed ms", lambda row: _ms(row.exposed_s)),
        ("busiest link", lambda row: _text(row.wire_bytes_link, bytes_text)),
    ]
    if any(row.time_to_target_s is not None for row in rows):
        columns.insert(1, ("to target s", lambda row: _reached(row, row.time_to_target_s)))
    if any(row.time_to_held_out_s is not None for row in rows):
        columns.insert(1, ("to held-out s", lambda row: _reached(row, row.time_to_held_out_s)))
    return columns


def _reached(row: Row, seconds: float | None) -> str:
    return _text(seconds, "{:.1f}".format, MISSING if row.kind == "one host" else "not reached")


def _text(value: float | None, text: Callable[[Any], str], missing: str = MISSING) -> str:
    return text(value) if value is not None else missing


def _ms(seconds: float | None) -> str:
    return _text(seconds, lambda known: f"{known * 1e3:.{0 if known >= 0.00995 else 1}f}")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
