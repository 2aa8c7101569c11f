"""The processor time of a run is told from that of others, and a bound is never above the step."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from weft.lab.rows import Reference
from weft.lab.usage import Reading, processor_s

KERNEL_THREAD = 0x00200000


def process(
    proc: Path, pid: int, parent: int, ticks: tuple[int, int, int, int], name: str = "x", flags: int = 0
) -> None:
    (proc / str(pid)).mkdir(parents=True)
    used = " ".join(map(str, ticks))
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1 {flags} 0 0 0 0 {used} 20 0 1 0 7\n")


def test_a_process_counts_with_all_that_it_started_and_with_the_kernels_threads(tmp_path: Path) -> None:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    process(tmp_path, 1, 0, (1000, 0, 0, 0))
    process(tmp_path, 2, 0, (7, 0, 0, 0), "kthreadd", KERNEL_THREAD)
    process(tmp_path, 14, 2, (0, 30, 0, 0), "ksoftirqd/0", KERNEL_THREAD)
    process(tmp_path, 50, 1, (100, 20, 3, 4), "odd) S 1 (name")
    process(tmp_path, 51, 50, (200, 0, 0, 0))
    process(tmp_path, 52, 51, (400, 0, 0, 0))
    process(tmp_path, 60, 1, (9000, 0, 0, 0))
    (tmp_path / "70").mkdir()  # has ended meanwhile
    assert processor_s(50, tmp_path) == pytest.approx((127 + 200 + 400 + 37) * tick)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_real_process_counts() -> None:
    assert processor_s(os.getpid()) >= sum(os.times()[:4]) - 0.05


def test_the_time_between_two_readings_is_divided_among_the_run_and_others() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    before = Reading(at_s=10, links=[(0, 0), (5, 5)], own_s=1, processes_s=4, busy_s=5, steal_s=0, all_s=20)
    later = dataclasses.replace(
        before, at_s=20, links=[(3, 4), (5, 15)], own_s=1 + 4 * cores, processes_s=7 + 4 * cores, busy_s=10 + 4 * cores,
        steal_s=1, all_s=20 + 10 * cores,
    )  # fmt: skip
    usage = before.until(later)
    assert usage.link_bytes == 10
    assert usage.own_cpu_share == pytest.approx(0.4)
    assert usage.other_cpu_share == pytest.approx(3 / (10 * cores))
    assert before.until(before).other_cpu_share == before.until(before).own_cpu_share == 0.0
    assert before.until(dataclasses.replace(later, own_s=1e9)).own_cpu_share == 1.0


@pytest.mark.parametrize(
    ("compute_s", "cpu_share", "sent", "bound_s"),
    [
        (0.4, 0.0, 0.0, 0.4),
        (0.4, 0.7, 0.0, 0.7),
        (0.4, 0.7, 9e7, 0.9),
        (0.4, 1.0, 0.0, 1.0),
        (1.02, 0.5, 0.0, 1.0),
        (1.1, 0.5, 0.0, None),
    ],
    ids=["computing alone", "processors", "links", "all processors", "measuring error", "disturbed"],
)
def test_a_bound_is_at_most_the_step(compute_s: float, cpu_share: float, sent: float, bound_s: float | None) -> None:
    reference = Reference(hosts=4, compute="real", payload_bytes_s=1e8)
    assert reference.bound_s(1.0, compute_s, cpu_share, sent) == bound_s
