"""The report's plots, rows in the order of their step time.

Weft's strategies have one hue and peers another, lines of the loss have shades of it; what the loop does is grey.
Lengths are points, 72 to an inch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from weft.errors import UserError
from weft.lab import learning
from weft.lab.rows import Result, Row, by_step, one_host_row, rows_of
from weft.lab.words import ms

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HUES = {"strategy": "#0072B2", "peer": "#D55E00"}
SOURCES = {"strategy": "Weft", "peer": "PyTorch"}
DASHES = (None, (7.0, 3.0), (3.0, 3.0), (10.0, 3.0, 3.0, 3.0))
"""Of lines, so that one beneath an equal one shows, and lines of similar shades differ."""
PHASES = {"forward": "#c4c8cc", "backward": "#7d848b", "wait": "#ffffff", "optimizer": "#33383d"}
INK, MUTED, LINE = "#22262a", "#646b72", "#dfe2e5"
WIDTH, RIGHT, TOP, BOTTOM = 720.0, 14.0, 26.0, 34.0
LOOK: dict[Any, Any] = {
    "svg.hashsalt": "weft",
    "svg.fonttype": "path",
    "text.parse_math": False,
    "hatch.linewidth": 0.5,
    "font.size": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "axes.labelsize": 9,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}
"""Settings of matplotlib: the same SVG every time, and a dollar in a name is a dollar."""
MOST_LANES = 12


def shown(name: str, most: int = 100) -> str:
    """A name for a plot: whole, or without its middle where no plot is wide enough for it; the table has all of it."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]} … {name[-(most // 2 - 2) :]}"


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib with its own defaults whatever the user's are, names taken literally, and the same SVG every time."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise UserError("the report needs matplotlib; run `pip install matplotlib`") from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(LOOK)
        yield


def mixed(ink: str, other: int, share: float) -> str:
    """A colour mixed with this share of white (255) or black (0)."""
    parts = (int(ink[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (other - part) * share):02x}" for part in parts)


def pale(ink: str) -> str:
    return mixed(ink, 255, 0.6)


def shades(rows: Sequence[Row]) -> dict[str, str]:
    """A colour for each row: shades of its kind's hue, from dark to light."""
    found = {}
    for kind, hue in HUES.items():
        names = [row.name for row in rows if row.kind == kind]
        for index, name in enumerate(names):
            at = (index + 1) / (len(names) + 1)  # 0 is black, 1/2 the hue, 1 white
            found[name] = mixed(hue, 0, 1 - 2 * at) if at < 0.5 else mixed(hue, 255, 2 * at - 1)
    return found


def _lanes(height: float, left: float, longest_s: float, top: float = TOP) -> tuple[Figure, Axes]:
    """A figure whose y axis counts points downwards from 0 to `height`, and whose x axis counts milliseconds."""
    from matplotlib.figure import Figure

    total = height + top + BOTTOM
    figure = Figure(figsize=(WIDTH / 72, total / 72))
    axes = figure.add_axes((left / WIDTH, BOTTOM / total, (WIDTH - left - RIGHT) / WIDTH, height / total))
    axes.set(xlim=(0, longest_s * 1e3), ylim=(height, 0), xlabel="ms", yticks=[])
    _calm(axes, "x")
    axes.spines["left"].set_visible(False)
    return figure, axes


def _calm(axes: Axes, grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x" if grid == "x" else "both", color=LINE, linewidth=0.7)
    axes.tick_params(length=3)


def _legend(figure: Figure, left: float, handles: Sequence[Artist], columns: int | None = None) -> None:
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (left / WIDTH, 1.0), "borderaxespad": 0.4}
    figure.legend(handles=list(handles), ncols=columns or len(handles), frameon=False, handlelength=1.6, **place)


def _draw_steps(result: Result) -> Figure | None:
    """A bar per row: computing, then exposed communication; the spread as a whisker, the bound as a tick."""
    rows = by_step(rows_of(result))
    done = [row for row in rows if row.finished]
    if not done:
        return None
    alone = one_host_row(result)
    longest = max((row.step_s or 0) + (row.step_s_spread or 0) for row in done)
    if alone is not None and alone.step_s is not None and alone.step_s < _MOST_STRETCHED * longest:
        longest = max(longest, alone.step_s)
    figure, axes = _lanes(_BAR * len(rows) + 14, RIGHT, longest * 1.12, _STEPS_TOP)
    for index, row in enumerate(rows):
        _draw_step(axes, row, 14 + _BAR * index)
    if alone is not None and alone.step_s is not None:
        _draw_one_host(axes, alone.step_s, longest)
    handles = _step_handles(done)
    _legend(figure, 8, handles, columns=len(handles) // 2)
    return figure


_BAR, _STEPS_TOP, _MOST_STRETCHED = 42.0, 42.0, 2.0
_PAPER: dict[str, Any] = {"facecolor": "white", "linewidth": 0, "pad": 0.6}
"""Behind a text that a line may cross."""


def _draw_step(axes: Axes, row: Row, top: float) -> None:
    name = axes.text(0, top + 11, shown(row.name), va="baseline", bbox=_PAPER)
    if row.step_s is None or not row.finished:
        axes.text(0, top + 25, "did not finish", va="baseline", color=MUTED, style="italic")
        return
    learns = learning.text(row.learning)
    if learns != "as dense":
        learns = "held-out loss not measured" if row.learning is None else learns
        axes.annotate(f"   {learns}", (1, 0), xycoords=name, va="bottom", color=MUTED, fontsize=8, bbox=_PAPER)
    hue, step, spread = HUES[row.kind], row.step_s * 1e3, (row.step_s_spread or 0) * 1e3
    computing = min((row.compute_s or 0) * 1e3, step)
    parts = [(0, computing), (computing, step - computing)]
    axes.broken_barh(parts, (top + 16, 12), facecolors=[hue, pale(hue)], linewidth=0)
    axes.errorbar(step, top + 22, xerr=spread, color=INK, linewidth=1, capsize=2.5)
    at: dict[str, Any] = {"xy": (step + spread, top + 25), "xytext": (7, 0), "textcoords": "offset points"}
    axes.annotate(f"{ms(row.step_s)} ms", va="baseline", bbox=_PAPER, **at)
    if row.bound_s is not None:
        bound = row.bound_s * 1e3
        axes.plot([bound, bound], [top + 14.5, top + 30], color=INK, linewidth=2, solid_capstyle="butt")
        axes.text(bound, top + 38, ms(row.bound_s), va="baseline", ha="right", color=MUTED, fontsize=7.5, bbox=_PAPER)


def _draw_one_host(axes: Axes, step_s: float, longest_s: float) -> None:
    """A line at the time that one host takes for as many samples; an arrow where that is far outside."""
    text, at, outside = f"one host alone: {ms(step_s)} ms", step_s * 1e3, step_s > longest_s
    if outside:
        axes.text(longest_s * 1.12e3, 9, f"{text} →", ha="right", color=MUTED, fontsize=8)
        return
    axes.axvline(at, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=0.5)
    left = at > longest_s * 500
    axes.text(at + longest_s * (-5 if left else 5), 9, text, ha="right" if left else "left", color=MUTED, fontsize=8)


def _step_handles(rows: Sequence[Row]) -> list[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars: list[Artist] = []
    for kind in HUES:
        if any(row.kind == kind for row in rows):
            bars.append(Patch(color=HUES[kind], linewidth=0, label=f"{SOURCES[kind]}: computing"))
            bars.append(Patch(color=pale(HUES[kind]), linewidth=0, label=f"{SOURCES[kind]}: exposed communication"))
    whisker = Line2D([], [], color=INK, linewidth=1, marker="|", markersize=5, label="step, with its spread")
    tick = Line2D([], [], color=INK, linestyle="", marker="|", markersize=10, markeredgewidth=2, label="bound, ms")
    return [*bars, whisker, tick]


def _draw_losses(result: Result) -> Figure | None:
    """Loss against time and against bytes, a line per row."""
    from matplotlib.figure import Figure

    curves = result["curves"]
    rows = [row for row in by_step(rows_of(result)) if curves.get(row.name, {}).get("loss")]
    if not rows:
        return None
    colours = shades(rows)
    columns = 2 if max(len(row.name) for row in rows) <= 48 else 1
    foot = 46 + 14.5 * -(-len(rows) // columns)
    total = 14 + 220 + foot
    figure = Figure(figsize=(WIDTH / 72, total / 72))
    half = (WIDTH - 2 * 48 - RIGHT - 10) / 2
    left = figure.add_axes((48 / WIDTH, foot / total, half / WIDTH, 220 / total))
    right = figure.add_axes(((2 * 48 + 10 + half) / WIDTH, foot / total, half / WIDTH, 220 / total), sharey=left)
    most = max(max(curves[row.name]["bytes"], default=0) for row in rows)
    unit, factor = ("GB", 1e9) if most >= 2e9 else ("MB", 1e6)
    for index, row in enumerate(rows):
        curve = curves[row.name]
        look: dict[str, Any] = {"color": colours[row.name], "linewidth": 1.7, "label": shown(row.name)}
        look["linestyle"] = (0, DASHES[index % len(DASHES)])
        left.plot(curve["time_s"], curve["loss"], **look)
        right.plot([count / factor for count in curve["bytes"]], curve["loss"], **look)
    for axes, label in ((left, "time, s"), (right, f"sent by a worker, {unit}")):
        _calm(axes, "both")
        axes.set(xlabel=label, ylabel="loss")
        axes.set_xlim(left=0)
        if result["target_loss"] is not None:
            axes.axhline(result["target_loss"], color=MUTED, linewidth=1, linestyle=":", label="target")
    handles, _ = left.get_legend_handles_labels()
    named = handles[: len(rows)]
    figure.legend(handles=named, loc="lower left", bbox_to_anchor=(40 / WIDTH, 0), ncols=columns, frameon=False)
    if result["target_loss"] is not None:
        right.annotate(
            "target",
            (1, result["target_loss"]),
            (0, 3),
            ("axes fraction", "data"),
            "offset points",
            ha="right",
            color=MUTED,
        )
    return figure


def lanes_of(wire: Sequence[Sequence[Any]]) -> list[list[tuple[float, float]]]:
    """The spans on the wire as (start, length) in ms: a lane per bucket, or one for all where buckets are many."""
    lanes: dict[Any, list[tuple[float, float]]] = {}
    for bucket, start, end in wire:
        lanes.setdefault(bucket, []).append((start * 1e3, (end - start) * 1e3))
    if len(lanes) > MOST_LANES:
        return [[span for lane in lanes.values() for span in lane]]
    return [lanes[bucket] for bucket in sorted(lanes)]


def _draw_timelines(result: Result) -> Figure | None:
    """One step per row: what the loop does, and what is on the wire meanwhile, on one time axis."""
    from matplotlib.patches import Patch

    found = [(row, result["timelines"].get(row.name)) for row in by_step(rows_of(result))]
    rows = [(row, line, lanes_of(line["wire"])) for row, line in found if line and line["loop"]]
    if not rows:
        return None
    longest = max(end for _, line, _ in rows for _, _, end in [*line["loop"], *line["wire"]])
    thick = [10.0 if len(lanes) == 1 else 6.0 for _, _, lanes in rows]
    heights = [32.0 + len(lanes) * each + 12 for each, (_, _, lanes) in zip(thick, rows, strict=True)]
    figure, axes = _lanes(sum(heights), 44, longest * 1.1)
    top = 0.0
    for (row, line, lanes), each, height in zip(rows, thick, heights, strict=True):
        axes.text(0, top + 12, shown(row.name), va="baseline")
        axes.annotate("loop", (0, top + 26), (-6, 0), textcoords="offset points", ha="right", color=MUTED)
        for phase, start, end in line["loop"]:
            look: dict[str, Any] = {"facecolor": PHASES.get(phase, "#a08f6a"), "edgecolor": MUTED, "linewidth": 0.4}
            hatch = "/////" if phase == "wait" else None
            axes.broken_barh([(start * 1e3, (end - start) * 1e3)], (top + 17, 12), hatch=hatch, **look)
        length = max(end for _, _, end in line["loop"])
        axes.text(length * 1e3, top + 26, f"  {ms(length)} ms", va="baseline")
        if lanes:
            middle = top + 31 + len(lanes) * each / 2 + 3
            axes.annotate("wire", (0, middle), (-6, 0), textcoords="offset points", ha="right", color=MUTED)
        for lane, spans in enumerate(lanes):
            axes.broken_barh(spans, (top + 31 + lane * each, each - 1), color=HUES[row.kind], linewidth=0)
        top += height
    handles = [Patch(facecolor=ink, edgecolor=MUTED, linewidth=0.4, label=phase) for phase, ink in PHASES.items()]
    handles[list(PHASES).index("wait")].set_hatch("/////")
    _legend(figure, 38, [*handles, Patch(color=HUES["strategy"], linewidth=0, label="a bucket on the wire")])
    return figure


PLOTS: dict[str, tuple[Callable[[Result], Figure | None], str]] = {
    "step": (_draw_steps, "Bars of step time, a bar per row, split into computing and exposed communication"),
    "loss": (_draw_losses, "Two panels of lines: loss against time, and loss against bytes sent, a line per row"),
    "timeline": (_draw_timelines, "Timelines of one step per row: what the loop does and what is on the wire"),
}


def inline_svg(text: str, prefix: str, label: str) -> str:
    """Matplotlib's SVG as part of a page: no prolog, metadata or style of its own, ids with a prefix, any width."""
    text = re.sub(r"<!--.*?-->\s*|<metadata>.*?</metadata>\s*|<style.*?</style>\s*", "", text, flags=re.DOTALL)
    text = text[text.index("<svg") :].replace("xlink:href=", "href=")
    text = re.sub(r'(\bid="|url\(#|\bhref="#)', rf"\g<1>{prefix}-", text)
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None
    return f'<svg role="img" aria-label="{escape(label)}" {view[0]}>{text[text.index(">") + 1 :].strip()}'
