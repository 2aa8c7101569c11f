"""The headline of a comparison, and the remarks that limit it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pure.made_results import asleep, failed, row, sample
from weft.lab import report, verdict
from weft.lab.rows import by_step, one_host_row, rows_of
from weft.lab.words import bit_rate, ms, times

TOPK = "bsp / direct / error_feedback(topk(ratio=0.01))"


def told(*rows: dict[str, Any], **others: Any) -> str:
    return verdict.headline({**sample(), "rows": list(rows), **others})


def test_the_winner_is_compared_with_the_peer_and_with_one_host() -> None:
    fast, other, peer = row("fast", 0.5), row("other", 0.7), row("ddp", 1.0, kind="peer")
    best = "fast is fastest: 500 ms a step, 2 times as fast as ddp and 3 times as fast as one host alone"
    assert told(other, fast, peer) == best
    assert told(fast, row("fsdp", 1.1, kind="peer"), peer) == best


def test_a_peer_may_win() -> None:
    best = row("ddp", 0.5, kind="peer")
    assert told(row("a", 1.0), best).startswith("ddp is fastest: 500 ms a step, 2 times as fast as a and 3")


def test_without_peers_the_next_row_is_named() -> None:
    assert told(row("a", 1.0), row("b", 0.8)).startswith("b is fastest: 800 ms a step, 1.25 times as fast as a and 1.9")


def test_a_job_that_one_host_does_faster_is_not_to_be_distributed() -> None:
    rows = [row("a", 3.0), row("b", 4.0)]
    assert told(*rows) == (
        "Do not distribute this job on these links: one host alone is 2 times as fast as a, the fastest of 2"
    )
    cluster = {**sample()["cluster"], "links": []}
    assert told(row("a", 3.0), cluster=cluster) == (
        "Do not distribute this job on this machine: one host alone is 2 times as fast as a"
    )


def test_rows_within_the_spread_have_no_winner() -> None:
    a, b, peer = row("a", 0.50), row("b", 0.53), row("ddp", 0.51, kind="peer")
    text = "within the spread (500 to 530 ms a step); each is about 3 times as fast as one host alone"
    assert told(a, b) == f"No clear winner: both are {text}"
    assert told(a, b, peer) == f"No clear winner: all three are {text}"
    assert "No clear winner" not in told(row("a", 0.50, spread_s=0.01), row("b", 0.53, spread_s=0.01))
    tiny = [row(f"{i}", at, spread_s=0.006, speedup=0.1) for i, at in enumerate((0.008, 0.011, 0.013, 0.016))]
    alone = {"step_s": 0.00025, "step_s_spread": 0.0, "samples_per_s": 128e3}
    assert told(*tiny, one_host=alone) == (
        "No clear winner: all four are within the spread (8.00 to 16.0 ms a step); one host alone is faster: 1.00 ms"
    )


def test_a_winner_names_the_rows_within_its_spread() -> None:
    a, b, peer = row("a", 0.50), row("b", 0.53), row("ddp", 1.0, kind="peer")
    assert told(a, b, peer) == (
        "a is fastest, level with b within the spread: 500 ms a step, 2 times as fast as ddp and 3 times as fast as "
        "one host alone"
    )
    assert told(row("a", 1.5), row("b", 2.0)).endswith("1.33 times as fast as b and no faster than one host alone")


def test_a_row_that_learns_worse_never_wins_alone() -> None:
    sparse, coded, peer = row(TOPK, 0.4, learning=1.681), row("int8", 0.6, learning=1.001), row("ddp", 1.2, kind="peer")
    assert told(sparse, coded, peer) == (
        f"{TOPK} is fastest: 400 ms a step, 3 times as fast as ddp and 3.8 times as fast as one host alone, but its "
        "held-out loss was 68 % above dense training's in our measurement; the fastest that learns as dense training "
        "does is int8: 600 ms a step, 2 times as fast as ddp and 2.5 times as fast as one host alone"
    )
    assert "but how it learns has not been measured" in told(row("asp", 0.4, learning=None), coded, peer)
    assert told(row(TOPK, 0.4, learning=1.681)).endswith("above dense training's in our measurement")


def test_a_row_that_learns_worse_and_is_no_faster_than_one_host_is_not_recommended() -> None:
    rows = [row(TOPK, 1.50, learning=1.68), row("a", 3.0)]
    assert told(*rows) == (
        f"Do not distribute this job on these links: one host alone is as fast as {TOPK}, the fastest of 2, whose "
        "held-out loss was 68 % above dense training's in our measurement"
    )


def test_one_host_may_be_the_fastest_that_learns() -> None:
    text = told(row(TOPK, 0.5, learning=1.68), row("a", 3.0))
    assert text.startswith(f"{TOPK} is fastest: 500 ms a step, 6 times as fast as a and 3 times as fast as one host")
    assert text.endswith("; of all that learn as dense training does, one host alone is the fastest")


def test_of_rows_within_the_spread_the_one_that_learns_wins() -> None:
    sparse, coded, peer = row(TOPK, 0.59, learning=1.681), row("int8", 0.6), row("ddp", 1.2, kind="peer")
    assert told(sparse, coded, peer).startswith(f"int8 is fastest, level with {TOPK} within the spread: 600 ms")


def test_one_row_and_none() -> None:
    assert told(row("a", 0.76)) == "a takes 760 ms a step, 2 times as fast as one host alone"
    assert told(row("a", 0.76), one_host=None) == "a takes 760 ms a step"
    assert told(failed("a", "no")) == "a did not finish"
    assert told(failed("a", "no"), failed("b", "no")) == "None of the 2 rows finished"
    assert told(row("a", 0.76), failed("b", "no"), one_host=None) == "a takes 760 ms a step; 1 of 2 rows did not finish"


def test_rows_that_compute_in_another_way_do_not_compete() -> None:
    assert told(row("a", 1.0), row("quick", 0.1, compute="sleep"), one_host=None) == "a takes 1000 ms a step"


def test_rows_are_in_the_order_of_their_steps_and_one_host_is_among_them() -> None:
    alone = one_host_row(sample())
    assert alone is not None and alone.step_s == pytest.approx(4 * 0.38) and alone.step_s_spread == pytest.approx(0.04)
    ordered = [each.name for each in by_step([*rows_of(sample()), alone])]
    assert ordered == ["bsp / ring / cast", "bsp / ring", "ddp", "one host alone", "<b>asp</b> / $\\frac$"]
    assert one_host_row(asleep()) is None


# --- remarks --------------------------------------------------------------------------------------------------------


def remarked(*rows: dict[str, Any], cores: int = 2, other: float | None = 0.02) -> list[str]:
    machine = {**sample()["machine"], "cores": cores, "other_cpu_share": other}
    return verdict.remarks({**sample(), "rows": list(rows), "machine": machine})


def test_a_result_in_order_has_no_remarks() -> None:
    assert verdict.remarks(sample()) == []


def test_a_busy_machine_is_reported() -> None:
    assert remarked(row("a", 1.0), other=0.48) == [
        "Other processes used 48 % of this machine's processors during the runs: figures are not comparable; repeat on "
        "an idle machine"
    ]
    assert remarked(row("a", 1.0), other=0.09) == remarked(row("a", 1.0), other=None) == []
    assert remarked(row("a", 1.0), other=0.04, cores=16)[0].startswith("Other processes used 4 %")


def test_disturbed_measurements_are_reported() -> None:
    (text,) = remarked(row("a", 1.0, bound_s=None, bound_share=None), row("b", 2.0))
    assert text.startswith("No bound for a: the measured step is shorter than computing alone")
    (text,) = remarked(row("a", 0.002, spread_s=0.004, speedup=3.0))
    assert text.startswith("The spread of a exceeds the step")
    rows = [row("a", 0.3, speedup=5.1), row("b", 0.6, speedup=2.5)]
    (text,) = remarked(*rows)
    assert text.startswith("The speed-up of a exceeds the number of hosts: the measurement of one host was disturbed")
    assert "one host" not in told(*rows)


# --- words ----------------------------------------------------------------------------------------------------------


def test_setting_says_what_ran_where() -> None:
    assert report.setting(sample()) == (
        "job wide · 4 emulated hosts · host 3 slowed 4x · links of 1 Gbit/s · real compute · "
        "25 steps after 5 of warm-up · two runs of each"
    )
    bare = {**sample(), "seeds": [7], "cluster": {"hosts": 1, "emulated": False, "slow": [], "links": []}}
    assert "· 1 host · links as they are ·" in report.setting(bare)
    assert report.setting(bare).endswith("· one run of each")


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.2345, "1234"), (0.0999, "99.9"), (0.09999, "100"), (0.0045, "4.50"), (0, "0.00")]
)
def test_ms(seconds: float, text: str) -> None:
    assert ms(seconds) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.416, "0.42"), (1.08, "1.08"), (1.499, "1.5"), (2, "2"), (2.84, "2.8"), (9.96, "10"), (34.6, "35")],
)
def test_times(ratio: float, text: str) -> None:
    assert times(ratio) == text


@pytest.mark.parametrize(
    ("bit_s", "text"), [(1e9, "1 Gbit/s"), (9.98e7, "99.8 Mbit/s"), (2.5e10, "25 Gbit/s"), (None, "unlimited")]
)
def test_bit_rate(bit_s: float | None, text: str) -> None:
    assert bit_rate(bit_s) == text
