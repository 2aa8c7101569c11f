"""The report of a comparison: one HTML file that needs nothing beside it, and its plots as PNG."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from weft.lab._plots import PLOTS, Result, drawing, inline_svg, ms, plain
from weft.lab.rows import Row, rows_of
from weft.units import bytes_text

MISSING = "–"


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


# --- words ----------------------------------------------------------------------------------------------------------


def bit_rate(bit_s: float | None) -> str:
    """A link's rate for people: `1 Gbit/s`."""
    if bit_s is None:
        return "unlimited"
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bit_s >= 0.9995 * factor:
            return f"{bit_s / factor:.4g} {unit}"
    return f"{bit_s:.4g} bit/s"


def listed(words: Sequence[object]) -> str:
    """`a, b and c`."""
    texts = [str(word) for word in words]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def ranked(result: Result) -> list[Row]:
    """The rows that finished, fastest first; rows that computed in another way than the rest do not compete."""
    done = [row for row in rows_of(result) if row.finished]
    alike = [row for row in done if row.compute == result["compute"]] or done
    return sorted(alike, key=_step_s)


def headline(result: Result) -> str:
    """The result in a sentence. A difference within the spread is called level, whatever its sign."""
    rows, order = rows_of(result), ranked(result)
    failed = sum(1 for row in rows if not row.finished)
    if not order:
        return f"{rows[0].name} did not finish" if len(rows) == 1 else f"None of the {len(rows)} rows finished"
    best, *others = order
    text = f"{best.name} took {ms(_step_s(best))} ms a step"
    if others:
        rivals = [row for row in others if row.kind != best.kind]
        rival = (rivals or others)[0]
        what = f"the fastest {rival.kind}" if len(rivals) > 1 else "the next" if not rivals and len(others) > 1 else ""
        text = f"{best.name} was fastest: {ms(_step_s(best))} ms a step, {_against(best, rival)} {rival.name}"
        text += f", {what}" if what else ""
        level = [row.name for row in others if row is not rival and _level(best, row)]
        text += f"; {listed(level)} {'is' if len(level) == 1 else 'are'} level within the spread" if level else ""
    elif best.speedup is not None:
        text += f", {best.speedup:.3g} times as fast as one host"
    return text + (f"; {failed} of {len(rows)} rows did not finish" if failed else "")


def _level(one: Row, other: Row) -> bool:
    return abs(_step_s(other) - _step_s(one)) <= (one.step_s_spread or 0) + (other.step_s_spread or 0)


def _step_s(row: Row) -> float:
    """The step of a row that finished."""
    assert row.step_s is not None
    return row.step_s


def _against(best: Row, other: Row) -> str:
    if _level(best, other):
        return "level within the spread with"
    return f"{_step_s(other) / _step_s(best):.3g} times as fast as"


def setting(result: Result) -> str:
    """What was run where, in a line."""
    cluster, seeds = result["cluster"], result["seeds"]
    hosts = f"{cluster['hosts']} {'emulated ' if cluster['emulated'] else ''}host{'s' if cluster['hosts'] != 1 else ''}"
    slow = [f"host {host} slowed {factor}" for host, _, factor in (item.partition("=") for item in cluster["slow"])]
    configured = sorted({link["asked_bit_s"] for link in cluster["links"]}, key=lambda rate: (rate is None, rate))
    rates = [bit_rate(rate) for rate in configured]
    span = listed(rates) if len(rates) <= 3 else f"{rates[0]} to {rates[-1]}"
    links = f"links of {span}" if rates else "links as they are"
    compute = "sleeping compute" if result["compute"] == "sleep" else f"{result['compute']} compute"
    steps = f"{result['steps'] - result['warmup']} steps after {result['warmup']} of warm-up"
    return " · ".join(
        [f"job {result['job']}", hosts, *slow, links, compute, steps, f"seed{'s' * (len(seeds) != 1)} {listed(seeds)}"]
    )


# --- the page -------------------------------------------------------------------------------------------------------

STYLE = """
:root{color-scheme:light dark;--ink:#22262a;--soft:#5c636a;--paper:#fbfbfa;--line:#dfe2e5;--mark:#e8f1f8;--bad:#a33a00}
@media(prefers-color-scheme:dark){:root{--ink:#e4e6e8;--soft:#a2a9b0;--paper:#17191b;--line:#34393e;--mark:#1d2f3d;--bad:#f0a070}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:1.75rem;line-height:1.25;margin:0 0 .5rem;font-weight:650;text-wrap:balance;overflow-wrap:anywhere}
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
tr.best{background:var(--mark)}tr.best th{font-weight:700}
.tag{display:inline-block;font-size:.75rem;font-weight:500;color:var(--soft);
border:1px solid currentColor;border-radius:3px;padding:0 .3em;line-height:1.35}
figure{margin:0;background:#fff;border:1px solid var(--line);border-radius:6px;padding:12px;overflow-x:auto}
svg{display:block;width:100%;min-width:600px;height:auto}
svg *{stroke-linejoin:round;stroke-linecap:butt}
.grid{display:grid;grid-template-columns:minmax(7rem,max-content) 1fr;gap:.35rem 1.5rem}.grid dt{margin:0}
dt{font-weight:600;margin-top:.8rem;overflow-wrap:anywhere}dd{margin:0}
pre{background:var(--mark);border-radius:6px;padding:.8rem 1rem;overflow-x:auto;
font:.8125rem/1.5 ui-monospace,Menlo,Consolas,monospace}
"""


def _page(result: Result, plots: dict[str, str]) -> str:
    no_loss = "no row has a loss"
    if result["compute"] == "sleep":
        no_loss = "sleeping compute does not train, so no row has a loss"
    lead = escape(setting(result)).replace(" · ", "&nbsp;· ")
    sections = [
        f'<h1>{escape(headline(result))}</h1>\n<p class="soft lead">{lead}</p>',
        _table(result),
        _plot("Where the time of a step goes", plots.get("step"), "No bars: no row finished."),
        _plot("Loss against time and against bytes", plots.get("loss"), f"No curves: {no_loss}."),
        _plot("One step of each", plots.get("timeline"), "No timelines: no row recorded one."),
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


def _plot(title: str, svg: str | None, otherwise: str) -> str:
    return f"<h2>{title}</h2>\n" + (f"<figure>{svg}</figure>" if svg else f'<p class="soft">{otherwise}</p>')


def _table(result: Result) -> str:
    columns = _columns(result)
    order = ranked(result)
    lines = []
    for row in rows_of(result):
        best = len(order) > 1 and row.name == order[0].name
        tags = ["fastest"] * best + ["peer"] * (row.kind == "peer")
        tags += [f"{row.compute} compute"] * (row.compute != result["compute"])
        name = " ".join([_name(row), *(f'<span class="tag">{escape(tag)}</span>' for tag in tags)])
        if not row.finished:
            cells = f'<td class="error" colspan="{len(columns)}">{escape(row.error or "no message")}</td>'
        else:
            cells = "".join(f"<td>{escape(cell(row))}</td>" for cell in columns.values())
        lines.append(f'<tr class="{"best" if best else "row"}"><th scope="row">{name}</th>{cells}</tr>')
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in ("", *columns))
    table = f'<table class="rows"><thead><tr>{heads}</tr></thead>\n<tbody>\n' + "\n".join(lines) + "\n</tbody></table>"
    alone = result["one_host"]
    about = f"{ms(alone['step_s'])} ms a step, {plain(alone['samples_per_s'])} samples/s" if alone else "not measured"
    note = f'<p class="soft small">One host alone: {about}.</p>'
    return f'<h2>Results</h2>\n<div class="wide" tabindex="0">{table}</div>\n{note}'


def _servers(result: Result) -> list[str]:
    """What parameter servers saw, where there were some: how late gradients were, who waited for whom."""
    rows = [(row, seen) for row in rows_of(result) if (seen := row.asynchrony)]
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
    columns: dict[str, tuple[Callable[[Row], float | None], Callable[[float], str]]] = {
        "samples/s": (lambda row: row.samples_per_s, plain),
        "speed‑up over one host": (lambda row: row.speedup, "{:.2f}×".format),
        "sent by a worker per step": (lambda row: row.wire_bytes_worker, bytes_text),
        "busiest link per step": (lambda row: row.wire_bytes_link, bytes_text),
        "exposed, ms": (lambda row: row.exposed_s, ms),
        "bound, ms": (lambda row: row.bound_s, ms),
        "share of bound": (lambda row: row.bound_share, "{:.0%}".format),
        to_target: (lambda row: row.time_to_target_s, lambda seconds: f"{plain(seconds)} s"),
        "final loss": (lambda row: row.final_loss, "{:.4f}".format),
    }

    def cell(head: str, value: Callable[[Row], float | None], text: Callable[[float], str]) -> Callable[[Row], str]:
        missing = "not reached" if head == to_target else MISSING
        return lambda row: missing if (known := value(row)) is None else text(known)

    def has_figures(head: str, value: Callable[[Row], float | None]) -> bool:
        return (head == to_target and target is not None) or any(value(row) is not None for row in rows_of(result))

    chosen = {head: cell(head, *column) for head, column in columns.items() if has_figures(head, column[0])}
    return {"step, ms": _step} | chosen


def _step(row: Row) -> str:
    """Step and spread in ms, the spread with two digits that count."""
    spread = float(f"{(row.step_s_spread or 0) * 1e3:.2g}")
    return f"{ms(_step_s(row))} ± {spread:g}"


def _name(row: Row) -> str:
    """A strategy's name, which may break where a bracket opens."""
    return escape(row.name).replace("(", "(<wbr>")


def _sentences(result: Result) -> str:
    pairs = (f"<dt>{_name(row)}</dt><dd>{escape(row.sentence or MISSING)}</dd>" for row in rows_of(result))
    return "<h2>What each row is</h2>\n<dl>\n" + "\n".join(pairs) + "\n</dl>"


MEANINGS = {
    "step": "The median over steps of the hosts' mean time; ± is the interquartile range. Speed-up is samples/s over "
    "those of one host alone.",
    "exposed": "Step minus computing alone: communication that no computing hides.",
    "bound": "The larger of computing alone and the bytes that the strategy must move over the measured payload rate. "
    "A step cannot be shorter, but for measuring error. The share of bound is bound over step: at 100 % "
    "nothing is left to win without computing or sending less.",
    "busiest link": "What crossed the busiest link, in its busier direction, headers and acknowledgements included.",
    "real compute": "Emulated hosts share this machine's cores, so computing slows down when they compute together.",
    "sleeping compute": "Each host sleeps as long as it would compute alone; bytes are real, nothing trains.",
}


def _notes(result: Result) -> str:
    machine = result["machine"]
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] != 1)} a worker"
    where = [machine["processor"], f"{machine['cores']} cores", threads]
    shares = (("cpu_share", "CPU share"), ("steal_share", "stolen"))
    where += [f"{label} {machine[key]:.1%}" for key, label in shares if machine[key] is not None]
    facts = {
        "machine": ", ".join(map(str, [*where, machine["system"]])),
        "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        "seeds": listed(result["seeds"]),
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
