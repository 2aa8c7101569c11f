"""Every loop under every strategy: what came of it, and what is expected (`expected.txt`).

`python -m tests.loops.table [STRATEGY ...]` runs all loops under these strategies, all by default, and writes their
columns anew. A cell that is neither equal nor refused is printed, and left open in the file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.loops.common import TOLERANCES
from tests.loops.ground import Failure, references, run_each
from tests.loops.loops import LOOPS

EXPECTED = Path(__file__).with_name("expected.txt")
HEAD = """\
# . equal to one process on the joined batch; r refused, with a remedy; ? not recorded
# Written by `python -m tests.loops.table`. Columns:
"""
REFUSALS = ("LoopError", "UserError", "Conflict", "JobError")
MARKS = {"equal": ".", "refused": "r"}


@dataclass(frozen=True)
class Column:
    """A strategy, and on how many workers in how many processes it runs; a process for each unless told."""

    strategy: str
    workers: int = 2
    processes: int | None = None


PRIORITY = "priority(partition=128B, credit=300B, least=64B)"
FUSED = "fused(bucket=256B, first=128B, alone=400B)"
TOPK = "error_feedback(topk(ratio=1.0))"
MIXED = f"mixed(matrices={TOPK}, kernels=random_k(ratio=1.0), vectors=gradient_dropping(drop=0.0))"
STRATEGIES = {
    "direct": Column("bsp / direct"),
    "ring": Column("bsp / ring / wfbp"),
    "tree_mg": Column("bsp / tree / mg_wfbp"),
    "hd_seq": Column("bsp / halving_doubling / sequential"),
    "prio": Column(f"bsp / direct / {PRIORITY}"),
    "ring_prio": Column("bsp / ring / priority"),
    "sf_prio": Column("bsp / tree / sufficient_factors / priority"),
    "sf": Column("bsp / ring / sufficient_factors"),
    "topk1": Column(f"bsp / recursive_doubling / {TOPK} / {FUSED}"),
    "mixed1": Column(f"bsp / tree / {MIXED} / priority"),
    "carried": Column("bsp / direct", processes=1),
    "carried_prio": Column("bsp / direct / priority", processes=1),
    "carried_topk": Column(f"bsp / ring / {TOPK}", processes=1),
    "ps2": Column("bsp / parameter_server(servers=2)"),
    "colo_prio": Column("bsp / colocated / priority"),
    "ps_topk": Column("bsp / parameter_server / topk(ratio=1.0)"),
    "hier": Column("bsp / hierarchical(groups=1)"),
    "ps_seq": Column("bsp / colocated / sequential"),
    "asp1": Column("asp / parameter_server(servers=2)", workers=1),
    "stale1": Column("staleness_weighted(delay_compensated(asp)) / parameter_server / priority", workers=1),
    "essp1": Column("essp(slack=0) / colocated", workers=1),
    "shm1": Column("asp / shared_memory", workers=1),
    "down1": Column("downpour / asp / parameter_server", workers=1),
    "soft": Column("softsync / parameter_server", workers=1),
    "alone": Column("bsp / direct", workers=1),
}
"""All of them lossless, or compressing to everything: each has to equal one process."""


@dataclass(frozen=True)
class Cell:
    """What came of a loop under a strategy: equal, refused, wrong, drift, crash or hang, and why."""

    strategy: str
    loop: str
    kind: str
    why: str

    @property
    def mark(self) -> str:
        """The cell's letter in the table."""
        return MARKS.get(self.kind, "?")

    def fault(self, expected: str = "?") -> str | None:
        """What is wrong with the cell, in a line; an expectation that is not recorded allows both marks."""
        name = f"{self.loop} under {self.strategy}"
        if self.mark == "?":
            return f"{name}: {self.kind}: {self.why}"
        if self.kind == "refused" and not has_remedy(self.why):
            return f"{name}: refused without a remedy: {self.why}"
        if expected not in ("?", self.mark):
            return f"{name}: {self.kind}, but expected.txt says {expected!r}: {self.why}"
        return None


def has_remedy(message: str) -> bool:
    """Whether a refusal continues after its first clause: `; remedy`, or a second sentence."""
    return re.search(r"; |\. [A-Z]", message) is not None


def cells(strategy: str, names: Sequence[str]) -> Iterator[Cell]:
    """Run loops under a strategy, and compare each with plain PyTorch."""
    column = STRATEGIES[strategy]
    loops = [LOOPS[name] for name in names]
    processes = column.processes or column.workers
    outcomes = run_each(loops, column.strategy, workers=column.workers, processes=processes)
    for name, plain, outcome in zip(names, references(loops, column.workers), outcomes, strict=True):
        yield Cell(strategy, name, *judge(outcome, plain, TOLERANCES.get(name, 1e-9)))


def judge(outcome: list[dict[str, Tensor]] | Failure, plain: dict[str, Tensor], tolerance: float) -> tuple[str, str]:
    """An outcome's kind, and why."""
    if isinstance(outcome, Failure):
        if outcome.kind in REFUSALS:
            return "refused", outcome.message
        return ("hang" if outcome.kind == "Hang" else "crash"), f"{outcome.kind}: {outcome.message}\n{outcome.trace}"
    for process, replica in enumerate(outcome[1:], 1):
        apart, where = difference(replica, outcome[0])
        if apart:
            return "drift", f"process {process} differs from process 0 by {apart:.1e} at {where}"
    apart, where = difference(outcome[0], plain)
    return ("equal" if apart <= tolerance else "wrong"), f"differs from one process by {apart:.1e} at {where}"


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference, relative to the tensor's largest element, and where it is."""
    if one.keys() != other.keys():
        return float("inf"), f"names {sorted(one.keys() ^ other.keys())}"
    return max(((apart(one[name], other[name]), name) for name in other), default=(0.0, ""))


def apart(one: Tensor, other: Tensor) -> float:
    """The difference of two tensors relative to the second's largest element; infinite for other shapes and for NaN."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    wide = torch.complex128 if other.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    if not one.isfinite().all():
        return float("inf")
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))


def read() -> dict[tuple[str, str], str]:
    """The recorded mark of each strategy and loop."""
    if not EXPECTED.exists():
        return {}
    lines = EXPECTED.read_text().splitlines()
    columns = lines[2].lstrip("# ").split()
    rows = (line.split() for line in lines[3:])
    return {(column, name): mark for name, marks in rows for column, mark in zip(columns, marks, strict=True)}


def write(marks: dict[tuple[str, str], str]) -> None:
    """Record the marks of all cells."""
    width = max(map(len, LOOPS))
    rows = [f"{name:{width}} {''.join(marks.get((s, name), '?') for s in STRATEGIES)}\n" for name in LOOPS]
    EXPECTED.write_text(f"{HEAD}# {' '.join(STRATEGIES)}\n{''.join(rows)}")


def main(strategies: Sequence[str]) -> int:
    """Run all loops under these strategies, and record what came of them."""
    faults = 0
    for strategy in strategies or STRATEGIES:
        marks = read()
        for cell in cells(strategy, list(LOOPS)):
            fault = cell.fault()
            faults += fault is not None
            marks[strategy, cell.loop] = "?" if fault else cell.mark
            print(fault or f"{cell.loop} under {strategy}: {cell.kind}: {cell.why}", flush=True)
        write(marks)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
