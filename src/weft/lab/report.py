"""The report of a comparison: one HTML file that needs nothing beside it, and its plots as PNG."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from weft.lab import learning
from weft.lab._plots import PLOTS, drawing, inline_svg
from weft.lab.rows import Result, Row, by_step, one_host_row, rows_of
from weft.lab.verdict import fastest, headline, remarks
from weft.lab.words import bit_rate, counted, listed, ms, plain
from weft.units import bytes_text

MISSING = "–"
HELD_OUT = "held‑out loss against dense"


def write_report(result: Result, folder: Path) -> Path:
    """Write report.html, and step.png, loss.png and timeline.png where there is something to draw, into `folder`."""
    plots = {}
    with drawing():
        for name, (draw, label) in PLOTS.items():
            picture = folder / f"{name}.png"
            picture.unlink(missing_ok=True)
            figure = draw(result)
            if figure is None:
                continue
            figure.savefig(picture, dpi=150)
            text = io.StringIO()
            figure.savefig(text, format="svg")
            plots[name] = inline_svg(text.getvalue(), name, label)
    path = folder / "report.html"
    path.write_text(_page(result, plots), encoding="utf-8")
    return path


def setting(result: Result) -> str:
    """What was run where, in a line."""
    cluster = result["cluster"]
    hosts = f"{cluster['hosts']} {'emulated ' if cluster['emulated'] else ''}host{'s' if cluster['hosts'] != 1 else ''}"
    slow = [f"host {host} slowed {factor}" for host, _, factor in (item.partition("=") for item in cluster["slow"])]
    configured = sorted({link["asked_bit_s"] for link in cluster["links"]}, key=lambda rate: (rate is None, rate))
    rates = [bit_rate(rate) for rate in configured]
    span = listed(rates) if len(rates) <= 3 else f"{rates[0]} to {rates[-1]}"
    links = f"links of {span}" if rates else "links as they are"
    compute = "sleeping compute" if result["compute"] == "sleep" else f"{result['compute']} compute"
    steps = f"{result['steps'] - result['warmup']} steps after {result['warmup']} of warm-up"
    return " · ".join(
        [
            f"job {result['job']}",
            hosts,
            *slow,
            links,
            compute,
            steps,
            _runs(result),
        ]
    )


def _runs(result: Result) -> str:
    count = len(result["seeds"])
    return f"{counted(count)} run{'s' * (count != 1)} of each"


# --- the page -------------------------------------------------------------------------------------------------------

STYLE = """
:root{color-scheme:light dark;--ink:#22262a;--soft:#5c636a;--paper:#fbfbfa;--line:#dfe2e5;--mark:#e8f1f8;--bad:#a33a00}
@media(prefers-color-scheme:dark){:root{--ink:#e4e6e8;--soft:#a2a9b0;--paper:#17191b;--line:#34393e;--mark:#1d2f3d;--bad:#f0a070}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:clamp(1.3rem,5vw,1.75rem);line-height:1.25;margin:0 0 .5rem;font-weight:650;
text-wrap:balance;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:2.75rem 0 .6rem;font-weight:650}
p,dd,li{max-width:75ch}p{margin:.5rem 0}.lead{max-width:none;text-wrap:balance}
.soft{color:var(--soft)}.small{font-size:.875rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.8125rem;line-height:1.4;font-variant-numeric:tabular-nums}
.rows{width:100%}
th,td{padding:.45rem;text-align:right;border-bottom:1px solid var(--line);vertical-align:top}
thead th{font-weight:600;color:var(--soft);vertical-align:bottom}
th:first-child,td:first-child{text-align:left;padding-left:.5rem}
tbody th{font-weight:500;min-width:12rem;overflow-wrap:anywhere}
td{white-space:nowrap}td.error{white-space:normal;text-align:left;color:var(--bad);overflow-wrap:anywhere}
tr.best{background:var(--mark)}tr.best th{font-weight:700}tr.alone{color:var(--soft)}
.remarks{margin:1rem 0;padding:.6rem 1rem;border-left:4px solid var(--bad);background:var(--mark);list-style:none}
.remarks li{max-width:none}.remarks li+li{margin-top:.4rem}
.tag{display:inline-block;font-size:.75rem;font-weight:500;color:var(--soft);
border:1px solid currentColor;border-radius:3px;padding:0 .3em;line-height:1.35}
figure{margin:0}
.plot{background:#fff;border:1px solid var(--line);border-radius:6px;padding:12px;overflow-x:auto}
figcaption{margin:.6rem 0;max-width:95ch;color:var(--soft);font-size:.875rem}
svg{display:block;width:100%;min-width:600px;height:auto}
svg *{stroke-linejoin:round;stroke-linecap:butt}
.grid{display:grid;grid-template-columns:minmax(7rem,max-content) 1fr;gap:.35rem 1.5rem}.grid dt{margin:0}
dt{font-weight:600;margin-top:.8rem;overflow-wrap:anywhere}dd{margin:0}
pre{background:var(--mark);border-radius:6px;padding:.8rem 1rem;white-space:pre-wrap;overflow-wrap:anywhere;
font:.8125rem/1.5 ui-monospace,Menlo,Consolas,monospace}
"""


def _page(result: Result, plots: dict[str, str]) -> str:
    no_loss = "no row has a loss"
    if result["compute"] == "sleep":
        no_loss = "sleeping compute does not train, so no row has a loss"
    lead = escape(setting(result)).replace(" · ", "&nbsp;· ")
    sections = [
        f'<h1>{_unbroken(headline(result))}</h1>\n<p class="soft lead">{lead}</p>\n{_remarks(result)}',
        _table(result),
        _plot("Where the time of a step goes", "step", plots, "No bars: no row finished."),
        _plot("Loss against time and against bytes", "loss", plots, f"No curves: {no_loss}."),
        _plot("One step of each", "timeline", plots, "No timelines: no row recorded one."),
        *_servers(result),
        _sentences(result),
        _notes(result),
    ]
    title = escape(f"weft compare {result['job']}")
    head = f'<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n<title>{title}</title>'
    icon = '<link rel="icon" href="data:,">'
    body = "\n".join(f"<section>\n{section}\n</section>" for section in sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n{icon}\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _remarks(result: Result) -> str:
    lines = "".join(f"<li>{escape(remark)}.</li>" for remark in remarks(result))
    return f'<ul class="remarks">{lines}</ul>' if lines else ""


def _plot(title: str, name: str, plots: dict[str, str], otherwise: str) -> str:
    if name not in plots:
        return f'<h2>{title}</h2>\n<p class="soft">{otherwise}</p>'
    caption = f"<figcaption>{escape(CAPTIONS[name])}</figcaption>"
    return f'<h2>{title}</h2>\n<figure><div class="plot" tabindex="0">{plots[name]}</div>\n{caption}</figure>'


def _table(result: Result) -> str:
    columns = _columns(result)
    winner, alone = fastest(result), one_host_row(result)
    lines = []
    for row in by_step([*rows_of(result), *([alone] if alone else [])]):
        best = len(result["rows"]) > 1 and row == winner
        tags = ["fastest"] * best + ["peer"] * (row.kind == "peer")
        tags += [f"{row.compute} compute"] * (row.compute != result["compute"])
        name = " ".join([_name(row), *(f'<span class="tag">{escape(tag)}</span>' for tag in tags)])
        if not row.finished:
            cells = f'<td class="error" colspan="{len(columns)}">{escape(row.error or "no message")}</td>'
        else:
            cells = "".join(f"<td>{escape(cell(row))}</td>" for cell in columns.values())
        kind = "best" if best else "alone" if row is alone else "row"
        lines.append(f'<tr class="{kind}"><th scope="row">{name}</th>{cells}</tr>')
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in ("", *columns))
    table = f'<table class="rows"><thead><tr>{heads}</tr></thead>\n<tbody>\n' + "\n".join(lines) + "\n</tbody></table>"
    return f'<h2>Results</h2>\n<div class="wide" tabindex="0">{table}</div>\n<p class="soft small">{_about(result)}</p>'


def _about(result: Result) -> str:
    """The table's note: what one host's row is, and where the figures on learning come from."""
    alone = result["one_host"]
    about = "One host alone was not measured."
    if alone:
        own = f"its own step takes {ms(alone['step_s'])} ms"
        about = f"One host alone: the time for as many samples as one step of the others; {own}."
    return f"{about} Held‑out loss against dense: not of these runs, but as measured once; see below."


def _servers(result: Result) -> list[str]:
    """What parameter servers saw, where there were some: how late gradients were, who waited for whom."""
    rows = [(row, seen) for row in by_step(rows_of(result)) if (seen := row.asynchrony)]
    if not rows:
        return []
    heads = (
        "",
        "staleness, updates",
        "at most",
        "busiest server, in and out",
        "requests waiting, at most",
        "longest wait",
    )
    lines = []
    for row, seen in rows:
        mean, most = seen["staleness_mean"], seen["staleness_most"]
        cells = [MISSING if mean is None else f"{mean:.2f}", MISSING if most is None else str(most)]
        cells += [bytes_text(seen["server_bytes"]), str(seen["queue_most"]), _wait(seen["longest_wait"])]
        body = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr class="row"><th scope="row">{_name(row)}</th>{body}</tr>')
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads)
    table = f'<table class="rows"><thead><tr>{head}</tr></thead>\n<tbody>\n' + "\n".join(lines) + "\n</tbody></table>"
    note = "Bytes and waits are of a whole run. A gradient is late by the updates since its worker read the model."
    return [f'<h2>Servers</h2>\n<div class="wide" tabindex="0">{table}</div>\n<p class="soft small">{note}</p>']


def _wait(longest: Sequence[Any] | None) -> str:
    """Who waited most, and for whom."""
    if longest is None:
        return MISSING
    who, on, seconds = longest
    return f"worker {who}, {plain(seconds)} s" + (f" for worker {on}" if on != who else "")


def _columns(result: Result) -> dict[str, Callable[[Row], str]]:
    """Heading and cell of each column that this comparison has figures for."""
    target = result["target_loss"]
    to_target = f"time to loss {target}"
    held_out = result["target_held_out"]
    to_held_out = f"time to held‑out loss {held_out}"
    columns: dict[str, tuple[Callable[[Row], float | None], Callable[[float], str]]] = {
        "speed‑up over one host": (lambda row: row.speedup, "{:.2f}×".format),
        HELD_OUT: (lambda row: row.learning, _held_out),
        "samples/s": (lambda row: row.samples_per_s, plain),
        "sent by a worker per step": (lambda row: row.wire_bytes_worker, bytes_text),
        "busiest link per step": (lambda row: row.wire_bytes_link, bytes_text),
        "exposed, ms": (lambda row: row.exposed_s, ms),
        "bound, ms": (lambda row: row.bound_s, ms),
        "share of bound": (lambda row: row.bound_share, lambda share: f"{100 * share:.0f} %"),
        to_target: (lambda row: row.time_to_target_s, lambda seconds: f"{plain(seconds)} s"),
        "final loss": (lambda row: row.final_loss, "{:.4f}".format),
        to_held_out: (lambda row: row.time_to_held_out_s, lambda seconds: f"{plain(seconds)} s"),
        "held‑out loss": (lambda row: row.held_out_loss, "{:.4f}".format),
        "merges": (lambda row: row.merges, "{:.0f}".format),
        "held up by merges": (lambda row: row.merge_s, lambda seconds: f"{plain(seconds)} s"),
        "consensus": (lambda row: row.consensus, "{:.2g}".format),
    }
    targets = [head for head, value in ((to_target, target), (to_held_out, held_out)) if value is not None]

    def cell(head: str, value: Callable[[Row], float | None], text: Callable[[float], str]) -> Callable[[Row], str]:
        missing = {to_target: "not reached", to_held_out: "not reached", HELD_OUT: "not measured"}.get(head, MISSING)
        return lambda row: text(known) if (known := value(row)) is not None else _missing(row, missing)

    def has_figures(head: str, value: Callable[[Row], float | None]) -> bool:
        return head in targets or any(value(row) is not None for row in rows_of(result))

    chosen = {head: cell(head, *column) for head, column in columns.items() if has_figures(head, column[0])}
    return {"step, ms": _step} | chosen


def _missing(row: Row, text: str) -> str:
    return MISSING if row.kind == "one host" else text


def _held_out(ratio: float) -> str:
    return learning.text(ratio).removesuffix(" held-out loss")


def _step(row: Row) -> str:
    """Step and spread in ms, the spread with two digits that count."""
    spread = float(f"{(row.step_s_spread or 0) * 1e3:.2g}")
    return f"{ms(row.step_s or 0)} ± {spread:g}"


def _name(row: Row) -> str:
    """A strategy's name, which may also break where a bracket opens."""
    return _unbroken(row.name).replace("(", "(<wbr>")


def _unbroken(text: str) -> str:
    """Strategies break behind a slash, not before it."""
    return escape(text).replace(" / ", "&nbsp;/ ")


def _sentences(result: Result) -> str:
    pairs = (f"<dt>{_name(row)}</dt><dd>{escape(row.sentence or MISSING)}</dd>" for row in by_step(rows_of(result)))
    return "<h2>What each row is</h2>\n<dl>\n" + "\n".join(pairs) + "\n</dl>"


CAPTIONS = {
    "step": "Dark: computing. Pale: exposed communication, which no computing hides. Whisker: the spread of the step. "
    "Black tick, with its milliseconds below: the bound. Dashed line: the time that one host alone takes for as many "
    "samples; distributing pays for bars that end left of it.",
    "loss": "Training loss of the first run of each. These few steps do not tell how a compressor learns; the column "
    "on held-out loss is of longer training.",
    "timeline": "The step of median length on process 0, from the end of the previous step to its own. Hatched: the "
    "loop waits for gradients or parameters. With priority the next forward begins while buckets of the previous step "
    "are on the wire. PyTorch's peers exchange inside backward, where buckets are not recorded: they have no wire "
    "rows, and their waiting is part of backward.",
}
MEANINGS = {
    "step": "The median over steps of the hosts' mean time; ± is the interquartile range. Differences smaller than the "
    "sum of two ranges are within the spread.",
    "speed-up": "Samples per second over those of one host that has the machine to itself.",
    "held-out loss": "How the compressor learns, against dense training: the held-out loss of the job text with 2 M "
    "parameters after 1,000 steps on 4 workers with AdamW, measured once (docs/compression.md, Effect on learning). "
    "Another model may differ. Exchanges without loss of precision learn as dense training does.",
    "exposed": "Step minus computing alone: communication that no computing hides.",
    "bound": "A step cannot be shorter: the largest of computing alone, the processor time of the run's own processes "
    "over the processors, and the bytes that the strategy must move over the measured payload rate. The share of bound "
    "is bound over step: at 100 % nothing is left to win without computing or sending less.",
    "busiest link": "The bytes on the busiest link, in its busier direction, headers and acknowledgements included.",
    "time to held-out loss": "Seconds of training until the merged model is at the target; the time of evaluations is "
    "left out.",
    "merges": "How often local optimizers merged their models in a run, and the seconds for which that held the loop "
    "up. Consensus is the distance of the local models from their mean at the last merge, relative to the anchor's "
    "norm.",
    "real compute": "Emulated hosts share this machine's cores, so computing slows down when they compute together.",
    "sleeping compute": "Each host sleeps as long as it would compute alone; bytes are real, nothing trains.",
}


def _notes(result: Result) -> str:
    machine, seeds = result["machine"], result["seeds"]
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] != 1)} a worker"
    where = [machine["processor"], f"{machine['cores']} cores", threads]
    shares = (("cpu_share", "CPU share"), ("other_cpu_share", "other processes"), ("steal_share", "stolen"))
    where += [f"{label} {100 * machine[key]:.1f} %" for key, label in shares if machine[key] is not None]
    facts = {
        "machine": ", ".join(map(str, [*where, machine["system"]])),
        "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        "runs": f"{_runs(result)}, with seed{'s' * (len(seeds) != 1)} {listed(seeds)}",
        "date": result["date"],
    }
    parts = [
        f"<h2>What the columns mean</h2>\n{_pairs(MEANINGS)}",
        f"<h2>How it was measured</h2>\n{_pairs(facts)}",
        _links(result["cluster"]["links"]),
        f"<h2>How to repeat it</h2>\n<pre>{escape(result['command'])}</pre>",
    ]
    return "\n".join(parts)


def _pairs(pairs: dict[str, str]) -> str:
    inner = "\n".join(f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in pairs.items())
    return f'<dl class="grid">\n{inner}\n</dl>'


def _links(links: Sequence[dict[str, Any]]) -> str:
    if not links:
        return "<p>The links are the machine's own; they were not measured.</p>\n"
    heads = ("host", "configured", "measured up", "measured down", "payload")
    lines = []
    for link in links:
        rates = (bit_rate(link[key]) for key in ("asked_bit_s", "up_bit_s", "down_bit_s"))
        cells = (str(link["host"]), *rates, f"{bytes_text(link['payload_bytes_s'])}/s")
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    return (
        f'<h2>Links</h2>\n<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>'
        + "\n".join(lines)
        + "</tbody></table></div>\n"
    )
