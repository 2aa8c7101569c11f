"""`weft compare`: run the same job under several strategies, side by side."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from weft import systems
from weft.cli import app
from weft.cli._cluster import BandwidthOption, LinkOption, SlowOption, parse_links
from weft.cli._show import JsonOption, console, emit
from weft.errors import UserError
from weft.lab import learning
from weft.lab.compare import Comparison, conduct
from weft.lab.contender import Contender
from weft.lab.progress import Progress
from weft.lab.rows import Row, by_step, one_host_row, rows_of
from weft.lab.spec import DEFAULTS, CompareSpec, contenders
from weft.lab.verdict import remarks
from weft.lab.words import ms
from weft.profile import Profile
from weft.strategy import Strategy
from weft.units import bytes_text


class _WithJob(TyperCommand):
    """A command that passes all words after -- to the job, whatever they look like."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["job"] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


MISSING = "–"
StrategiesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="STRATEGY…", help=f"Strategies; by default {', '.join(DEFAULTS)}. After --, the arguments of the job."
    ),
]
PeersOption = Annotated[
    str,
    typer.Option(
        help="PyTorch baselines: ddp, ddp-tuned, ddp-fp16, ddp-powersgd, ddp-localsgd, fsdp. By default ddp if "
        "no strategy is named, else none."
    ),
]


@app.command(cls=_WithJob)
def compare(
    ctx: typer.Context,
    job: Annotated[str, typer.Argument(help="A script, or a bundled job: text, wide, vision.")],
    strategies: StrategiesArgument = None,
    system: Annotated[list[str] | None, typer.Option(help="The strategy of a surveyed system. Repeatable.")] = None,
    group: Annotated[str | None, typer.Option("--systems", help="All systems of a group that run.")] = None,
    peers: PeersOption = "",
    hosts: Annotated[int, typer.Option(help="Number of emulated hosts, with one worker each.")] = 4,
    bandwidth: BandwidthOption = "1gbit",
    link: LinkOption = None,
    slow: SlowOption = None,
    compute: Annotated[str, typer.Option(help="real, or sleep: replace compute by its measured duration.")] = "real",
    profile: Annotated[
        Path | None, typer.Option(help="Durations for --compute sleep, as a file; measured first by default.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run; the first five are warm-up.")] = 30,
    seeds: Annotated[int, typer.Option(help="Number of seeds; every contender runs once with each.")] = 2,
    target_loss: Annotated[float | None, typer.Option(help="Measure the time to reach this loss.")] = None,
    links: Annotated[
        str, typer.Option(help="emulated; loopback: without shaped links; auto: loopback if emulation is impossible.")
    ] = "emulated",
    out: Annotated[Path | None, typer.Option(help="Result folder; a new one in runs/ by default.")] = None,
    json: JsonOption = None,
) -> None:
    """Run JOB under each strategy on an emulated cluster, and compare the results in a table and a report."""
    show = console(json)
    named = [name.strip() for name in peers.split(",") if name.strip()]
    published = _systems(system or [], group)
    if profile is not None and compute != "sleep":
        raise UserError("--profile is for --compute sleep; omit it, or add --compute sleep")
    spec = CompareSpec(
        job=job,
        args=tuple(ctx.meta["job"]),
        contenders=(*published, *contenders(strategies or (), named, defaults=not published)),
        hosts=hosts,
        bandwidth=bandwidth,
        links=parse_links(link),
        slow=tuple(slow or ()),
        compute=compute,  # type: ignore[arg-type]
        profile=Profile.read(profile) if profile is not None else None,
        steps=steps,
        seeds=seeds,
        target_loss=target_loss,
        network=links,  # type: ignore[arg-type]
        out=out,
        command=shlex.join(["weft", *sys.argv[1:]]),
    ).checked()
    with _Watch(show) as watch:
        found = conduct(spec, watch)
    emit(found.result, json)
    _print_results(show, found)
    if found.result["interrupted"]:
        raise KeyboardInterrupt


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
        self.began = time.monotonic()

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, progress: Progress) -> None:
        if not progress.emulated:
            self._say("hosts are processes on loopback, links are not shaped")
        self._say("one host alone, to measure its step time …")
        if progress.expected_s is not None:
            spec = progress.spec
            runs = (len(spec.contenders) + 1) * spec.seeds
            self._say(f"expected: about {_duration(progress.expected_s)} for {runs} runs of {spec.steps} steps")
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
            self.done = done
            left = f", {_duration(self._left(progress))} left" if progress.expected_s else ""
            self.show.print(f"{done} runs done{left}")

    def _left(self, progress: Progress) -> float:
        return max(0.0, (progress.expected_s or 0.0) - (time.monotonic() - self.began))

    def _picture(self, progress: Progress) -> Table:
        table = _table(progress.rows(), self.show.width)
        event = progress.event
        at = f"step {event['step']}/{event['steps']}" if event else "starting"
        left = f"about {_duration(self._left(progress))} left" if progress.expected_s else ""
        table.caption = escape(f"{progress.running}: {at}   {left}" if progress.running else left)
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
        ("samples/s", lambda row: _text(row.samples_per_s, "{:.1f}".format)),
        ("bound ms", lambda row: _ms(row.bound_s)),
        ("exposed ms", lambda row: _ms(row.exposed_s)),
        ("busiest link", lambda row: _text(row.wire_bytes_link, bytes_text)),
    ]
    if any(row.time_to_target_s is not None for row in rows):
        columns.insert(1, ("to target s", _to_target))
    return columns


def _to_target(row: Row) -> str:
    return _text(row.time_to_target_s, "{:.1f}".format, MISSING if row.kind == "one host" else "not reached")


def _text(value: float | None, text: Callable[[float], str], missing: str = MISSING) -> str:
    return text(value) if value is not None else missing


def _ms(seconds: float | None) -> str:
    return _text(seconds, lambda known: f"{known * 1e3:.{0 if known >= 0.00995 else 1}f}")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
