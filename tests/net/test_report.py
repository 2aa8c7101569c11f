"""The report as a browser shows it: plots that draw, nothing fetched, nothing too wide, nothing taken for markup."""

from __future__ import annotations

import builtins
import copy
import html
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.errors import UserError
from weft.lab import _plots, report
from weft.lab.rows import Row

PLOTS = ("step", "loss", "timeline")


def row(name: str, step_s: float, *, spread_s: float = 0.02, **others: Any) -> dict[str, Any]:
    """A row as `weft compare` gives it, its figures in keeping with one another."""
    bound_s = step_s * 0.9
    figures: dict[str, Any] = {"step_s": step_s, "step_s_spread": spread_s, "samples_per_s": 128 / step_s}
    figures |= {"speedup": 0.38 * 4 / step_s, "wire_bytes_worker": 1.5e8, "wire_bytes_link": 1.57e8}
    figures |= {"compute_s": 0.4, "exposed_s": step_s - 0.4, "bound_s": bound_s, "bound_share": bound_s / step_s}
    figures |= {"final_loss": 2.31, "time_to_target_s": 12.3}
    known = {"kind": "strategy", "sentence": f"{name}: every worker waits for every worker.", "compute": "real"}
    return Row(name=name, **(known | figures | others)).to_json()


def failed(name: str, error: str) -> dict[str, Any]:
    sentence = f"{name}: every worker waits for every worker."
    return Row(name=name, kind="strategy", sentence=sentence, compute="real", error=error).to_json()


def curve(step_s: float, step_bytes: float) -> dict[str, list[float]]:
    steps = range(1, 31)
    loss = [2.2 + 2 * math.exp(-step / 9) for step in steps]
    return {"time_s": [step * step_s for step in steps], "bytes": [step * step_bytes for step in steps], "loss": loss}


def timeline(step_s: float, buckets: int) -> dict[str, list[list[Any]]]:
    end = step_s - 0.02
    loop = [["forward", 0.0, 0.13], ["backward", 0.13, 0.38], ["wait", 0.38, end], ["optimizer", end, step_s]]
    each = (end - 0.2) / max(1, buckets)
    return {"loop": loop, "wire": [[i, 0.2 + i * each, 0.2 + (i + 1) * each] for i in range(buckets)]}


def sample() -> dict[str, Any]:
    """Four rows: two strategies, a peer, and one that failed, whose name and error look like markup."""
    rows = [row("bsp / ring", 1.27), row("bsp / ring / cast", 0.71), row("ddp", 1.35, kind="peer")]
    rows.append(failed("<b>asp</b> / $\\frac$", "worker 2 ended with <script>console.error(1)</script> & status 1"))
    link = {"asked_bit_s": 1e9, "up_bit_s": 0.998e9, "down_bit_s": 0.997e9, "payload_bytes_s": 1.19e8}
    done = rows[:3]
    return {
        "job": "wide",
        "command": "weft compare wide 'bsp / ring' --peers ddp --hosts 4 --bandwidth 1gbit",
        "compute": "real",
        "steps": 30,
        "warmup": 5,
        "seeds": [0, 1],
        "target_loss": 2.5,
        "date": "2026-11-15T12:00:00Z",
        "cluster": {"hosts": 4, "emulated": True, "slow": ["3=4x"], "links": [{"host": i, **link} for i in range(4)]},
        "machine": {
            "cores": 2,
            "threads": 1,
            "system": "Linux-6.1",
            "processor": "AMD EPYC",
            "cpu_share": 0.93,
            "steal_share": 0.001,
            "versions": {"weft": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        },
        "one_host": {"step_s": 0.38, "samples_per_s": 84.0},
        "rows": rows,
        "curves": {
            each["name"]: curve(each["step_s"], 1.5e8 if "cast" not in each["name"] else 0.75e8) for each in done
        },
        "timelines": {each["name"]: timeline(each["step_s"], 5) for each in done},
    }


def asleep() -> dict[str, Any]:
    """Nine rows with names of sixty characters on sixteen hosts, which only sleep."""
    tail = "error_feedback(topk(ratio=0.01)) / wfbp"
    names = [f"ssp(bound={i}) / ring / {tail}" for i in range(8)]
    rows = [row(name, 0.9 + 0.2 * i, speedup=None, final_loss=None) for i, name in enumerate(names)]
    rows.append(row("fsdp", 1.1, kind="peer", speedup=None, final_loss=None))
    for each in rows:
        each.update(compute="sleep", time_to_target_s=None, wire_bytes_link=None)
    link = {"asked_bit_s": 1e8, "up_bit_s": 0.998e8, "down_bit_s": 0.997e8, "payload_bytes_s": 1.19e7}
    cluster = {"hosts": 16, "emulated": True, "slow": [], "links": [{"host": i, **link} for i in range(16)]}
    lines = {each["name"]: timeline(each["step_s"], 4 * i) for i, each in enumerate(rows)}
    given = {"compute": "sleep", "rows": rows, "curves": {}, "timelines": lines, "one_host": None, "target_loss": None}
    return {**sample(), **given, "cluster": cluster}


# --- the words ------------------------------------------------------------------------------------------------------


def told(*rows: dict[str, Any]) -> str:
    return report.headline({**sample(), "rows": list(rows)})


def test_headline_compares_with_the_peer() -> None:
    fast, other, peer = row("fast", 0.5), row("other", 0.7), row("ddp", 1.0, kind="peer")
    assert told(other, fast, peer) == "fast was fastest: 500 ms a step, 2 times as fast as ddp"
    slower = row("fsdp", 1.1, kind="peer")
    assert told(fast, slower, peer) == "fast was fastest: 500 ms a step, 2 times as fast as ddp, the fastest peer"


def test_headline_admits_that_a_peer_won() -> None:
    best = row("ddp", 0.5, kind="peer")
    assert told(row("a", 1.0), best) == "ddp was fastest: 500 ms a step, 2 times as fast as a"


def test_headline_without_peers() -> None:
    assert told(row("a", 1.0), row("b", 0.8)) == "b was fastest: 800 ms a step, 1.25 times as fast as a"
    assert told(row("a", 1.0), row("b", 0.8), row("c", 2.0)).endswith("1.25 times as fast as a, the next")


def test_headline_calls_what_lies_within_the_spread_level() -> None:
    a, b, peer = row("a", 0.50), row("b", 0.53), row("ddp", 1.0, kind="peer")
    assert told(a, b).endswith("500 ms a step, level within the spread with b")
    assert told(a, b, peer).endswith("2 times as fast as ddp; b is level within the spread")
    assert "level" not in told(row("a", 0.50, spread_s=0.01), row("b", 0.53, spread_s=0.01))


def test_headline_of_one_row_and_of_none() -> None:
    assert told(row("a", 0.76)) == "a took 760 ms a step, 2 times as fast as one host"
    assert told(row("a", 0.76, speedup=None)) == "a took 760 ms a step"
    assert told(failed("a", "no")) == "a did not finish"
    assert told(failed("a", "no"), failed("b", "no")) == "None of the 2 rows finished"
    assert told(row("a", 0.76, speedup=None), failed("b", "no")) == "a took 760 ms a step; 1 of 2 rows did not finish"


def test_rows_that_compute_in_another_way_do_not_compete() -> None:
    assert told(row("a", 1.0, speedup=None), row("quick", 0.1, compute="sleep")) == "a took 1000 ms a step"


def test_setting_says_what_ran_where() -> None:
    assert report.setting(sample()) == (
        "job wide · 4 emulated hosts · host 3 slowed 4x · links of 1 Gbit/s · real compute · "
        "25 steps after 5 of warm-up · seeds 0 and 1"
    )
    bare = {**sample(), "seeds": [7], "cluster": {"hosts": 1, "emulated": False, "slow": [], "links": []}}
    assert "· 1 host · links as they are ·" in report.setting(bare) and report.setting(bare).endswith("seed 7")


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.2345, "1234"), (0.0999, "99.9"), (0.09999, "100"), (0.0045, "4.50"), (0, "0.00")]
)
def test_ms(seconds: float, text: str) -> None:
    assert _plots.ms(seconds) == text


@pytest.mark.parametrize(
    ("bit_s", "text"), [(1e9, "1 Gbit/s"), (9.98e7, "99.8 Mbit/s"), (2.5e10, "25 Gbit/s"), (None, "unlimited")]
)
def test_bit_rate(bit_s: float | None, text: str) -> None:
    assert report.bit_rate(bit_s) == text


def test_names_stay_whole_up_to_a_hundred_characters() -> None:
    assert _plots.shown("n" * 100) == "n" * 100
    short = _plots.shown("a" * 150 + "z" * 150)
    assert len(short) <= 100 and short.startswith("aaa") and short.endswith("zzz")


def test_buckets_have_lanes_until_they_are_too_many() -> None:
    few = [[1, 0.5, 0.75], [0, 0.0, 0.25], [1, 1.0, 1.25]]
    assert _plots.lanes_of(few) == [[(0.0, 250.0)], [(500.0, 250.0), (1000.0, 250.0)]]
    assert len(_plots.lanes_of([[i, 0, 1] for i in range(_plots.MOST_LANES)])) == _plots.MOST_LANES
    assert [len(lane) for lane in _plots.lanes_of([[i, 0, 1] for i in range(40)])] == [40]
    assert _plots.lanes_of([]) == []


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    assert report.write_report(sample(), folder) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_nothing_is_fetched(page: str) -> None:
    assert not re.search(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:|//)|@import|url\(\s*["']?(?!#)""", page)
    assert "<script" not in page and "<img" not in page


def test_data_is_never_markup(page: str) -> None:
    assert "<b>" not in page and "&lt;b&gt;asp&lt;/b&gt; / $\\frac$" in page
    assert "&lt;script&gt;console.error(1)&lt;/script&gt; &amp; status 1" in page


def test_ids_are_unique_and_references_lead_somewhere(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 100
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', page)) <= set(ids)


def test_the_fastest_row_is_marked_and_errors_span_the_table(page: str) -> None:
    assert re.findall(r'<tr class="best"><th scope="row">([^<]+?) <', page) == ["bsp / ring / cast"]
    heads = page.count('<th scope="col">') - 5  # the table of links has five
    assert heads == 11 and f'class="error" colspan="{heads - 1}"' in page


def test_pictures_are_not_blank(folder: Path) -> None:
    from matplotlib import image

    for name in PLOTS:
        pixels = image.imread(folder / f"{name}.png")
        assert len({tuple(pixel) for pixel in pixels[::2, ::2].reshape(-1, pixels.shape[-1]).tolist()}) > 10, name


def test_the_same_result_gives_the_same_file(page: str, tmp_path: Path) -> None:
    given = sample()
    before = copy.deepcopy(given)
    assert report.write_report(given, tmp_path).read_text(encoding="utf-8") == page and given == before


def test_matplotlib_is_left_as_it_was(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 31, "text.parse_math": True}):
        report.write_report(sample(), tmp_path)
        assert matplotlib.rcParams["font.size"] == 31 and matplotlib.rcParams["text.parse_math"]


def test_without_loss_a_sentence_stands_for_the_curves(tmp_path: Path) -> None:
    (tmp_path / "loss.png").write_text("of an earlier report")
    text = report.write_report(asleep(), tmp_path).read_text(encoding="utf-8")
    assert "sleeping compute does not train" in text and "final loss" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "step.png", "timeline.png"]


def test_a_report_of_failures_alone(tmp_path: Path) -> None:
    given = {**sample(), "rows": [failed("a", "no"), failed("b", "")], "curves": {}, "timelines": {}}
    text = report.write_report(given, tmp_path).read_text(encoding="utf-8")
    assert "None of the 2 rows finished" in text and "no message" in text
    assert "<svg" not in text and 'class="best"' not in text


def test_a_loss_that_diverged_is_shown_as_such(tmp_path: Path) -> None:
    given = sample()
    given["rows"][0].update(final_loss=math.nan, time_to_target_s=None)
    given["curves"]["bsp / ring"]["loss"][20:] = [math.nan] * 10
    text = report.write_report(given, tmp_path).read_text(encoding="utf-8")
    assert "<td>not reached</td><td>nan</td>" in text and (tmp_path / "loss.png").exists()


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="pip install matplotlib"):
        report.write_report(sample(), tmp_path)
    assert not list(tmp_path.iterdir())


# --- in a browser ---------------------------------------------------------------------------------------------------

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
)
PROBE = """<script>
const seen = [...document.querySelectorAll("svg")].map(svg => {
  const box = svg.getBBox(), shown = svg.getBoundingClientRect();
  const view = svg.viewBox.baseVal;
  return {width: box.width, height: box.height, x: box.x, y: box.y, paths: svg.querySelectorAll("path").length,
          view: [view.width, view.height], shown: [shown.width, shown.height], label: svg.getAttribute("aria-label")};
});
const root = document.documentElement;
document.body.dataset.seen = JSON.stringify({svgs: seen, scroll: root.scrollWidth, inner: innerWidth,
  bold: document.querySelectorAll("b").length, rows: document.querySelectorAll("table.rows tbody tr").length,
  fetched: performance.getEntriesByType("resource").map(entry => entry.name)});
</script>"""


def browse(path: Path, tmp: Path, width: int = 1000) -> dict[str, Any]:
    """What Chromium makes of a copy of a page, as a script in that copy sees it; its console must stay silent."""
    browser = shutil.which("chromium")
    if browser is None:
        if "CI" not in os.environ:
            pytest.skip("no chromium here")
        pytest.fail("no chromium here, and CI must have one")
    probed = tmp / "probed.html"
    probed.write_text(path.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    command = [browser, *FLAGS, f"--user-data-dir={tmp / 'profile'}", f"--window-size={width},900", "--dump-dom"]
    done = subprocess.run([*command, probed.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, "the page's script did not run"
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen


@pytest.mark.parametrize(("make", "plots", "rows"), [(sample, 3, 4), (asleep, 2, 9)], ids=["sample", "asleep"])
def test_plots_draw_whole_and_the_page_fits(
    make: Callable[[], dict[str, Any]], plots: int, rows: int, tmp_path: Path
) -> None:
    seen = browse(report.write_report(make(), tmp_path), tmp_path)
    assert len(seen["svgs"]) == plots and seen["rows"] == rows
    for svg in seen["svgs"]:
        assert svg["label"] and svg["paths"] > 50
        width, height = svg["view"]
        assert svg["width"] > 0.9 * width and svg["height"] > 0.9 * height
        assert svg["x"] > -1 and svg["y"] > -1, "something is drawn left of the plot, or above it"
        assert svg["x"] + svg["width"] < width + 1 and svg["y"] + svg["height"] < height + 1, "a plot is cut off"
        assert svg["shown"][0] > 850 and abs(svg["shown"][1] / svg["shown"][0] - height / width) < 0.01
    assert seen["scroll"] <= seen["inner"] == 1000
    assert seen["bold"] == 0 and seen["fetched"] == []


def test_the_page_fits_a_narrow_window(folder: Path, tmp_path: Path) -> None:
    seen = browse(folder / "report.html", tmp_path, width=600)
    assert seen["scroll"] <= seen["inner"] == 600


def test_the_console_is_heard(tmp_path: Path) -> None:
    loud = tmp_path / "loud.html"
    loud.write_text("<!doctype html><body><script>console.error('heard')</script></body>")
    with pytest.raises(AssertionError, match="heard"):
        browse(loud, tmp_path)
