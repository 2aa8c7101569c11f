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

from tests.pure.made_results import asleep, failed, row, sample
from weft.errors import UserError
from weft.lab import _plots, report
from weft.lab.rows import Row

PLOTS = ("step", "loss", "timeline")


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
    assert "<b>" not in page and "&lt;b&gt;asp&lt;/b&gt;&nbsp;/ $\\frac$" in page
    assert "&lt;script&gt;console.error(1)&lt;/script&gt; &amp; status 1" in page


def test_ids_are_unique_and_references_lead_somewhere(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 100
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', page)) <= set(ids)


def test_the_fastest_row_is_marked_and_errors_span_the_table(page: str) -> None:
    assert re.findall(r'<tr class="best"><th scope="row">([^<]+?) <', page.replace("&nbsp;", " ")) == [
        "bsp / ring / cast"
    ]
    heads = page.count('<th scope="col">') - 5  # the table of links has five
    assert heads == 12 and f'class="error" colspan="{heads - 1}"' in page


def test_without_a_clear_winner_no_row_is_marked(tmp_path: Path) -> None:
    given = {**sample(), "rows": [row("a", 0.50), row("b", 0.53)], "curves": {}, "timelines": {}}
    text = report.write_report(given, tmp_path).read_text(encoding="utf-8")
    assert "No clear winner" in text and 'class="best"' not in text and ">fastest<" not in text


def test_rows_are_sorted_and_one_host_stands_among_them(page: str) -> None:
    names = re.findall(r'<tr class="(?:best|row|alone)"><th scope="row">([^<]*?) ?<', page.replace("&nbsp;", " "))
    assert names == ["bsp / ring / cast", "bsp / ring", "ddp", "one host alone", "&lt;b&gt;asp&lt;/b&gt; / $\\frac$"]
    assert "its own step takes 380 ms" in page


def test_the_number_of_runs_stands_above_the_table_and_beside_their_seeds(page: str) -> None:
    assert page.replace("&nbsp;", " ").count("two runs of each") == 2
    assert "two runs of each, with seeds 0 and 1" in page


def test_remarks_stand_below_the_headline(page: str, tmp_path: Path) -> None:
    assert '<ul class="remarks">' not in page
    busy = {**sample(), "machine": {**sample()["machine"], "other_cpu_share": 0.48}}
    busy["rows"] = [row("a", 1.0, bound_s=None, bound_share=None), row("b", 2.0, learning=1.681)]
    text = report.write_report({**busy, "curves": {}, "timelines": {}}, tmp_path).read_text(encoding="utf-8")
    assert text.index("<h1>") < text.index('<ul class="remarks"><li>Other processes used 48 %') < text.index("<h2>")
    assert "<li>No bound for a:" in text and "<td>–</td>" in text and "<td>+68 %</td>" in text


def test_pictures_have_captions(page: str) -> None:
    assert page.count("<figcaption>") == page.count("<svg") == 3
    for caption in report.CAPTIONS.values():
        assert html.escape(caption) in page


# --- pictures -------------------------------------------------------------------------------------------------------


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


def test_each_kind_of_row_has_a_hue_and_each_line_a_shade_of_it() -> None:
    rows = [Row(**row(f"{kind} {i}", 1.0, kind=kind)) for kind in ("strategy", "peer") for i in range(5)]
    found = _plots.shades(rows)
    assert len(set(found.values())) == 10
    assert _plots.shades(rows[:1]) == {"strategy 0": _plots.HUES["strategy"].lower()}


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


@pytest.mark.parametrize(("make", "plots", "rows"), [(sample, 3, 5), (asleep, 2, 9)], ids=["sample", "asleep"])
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
