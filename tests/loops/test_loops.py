"""Training loops as people write them, under every kind of strategy.

A loop's outcome equals one plain PyTorch process on the joined batch, or it is a refusal with a remedy; `expected.txt`
says which of the two. One test runs its loops one after another in the same processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.loops.loops import LOOPS
from tests.loops.table import STRATEGIES, cells, read

OFFSETS = (0, 7, 13, 19)
"""Loop k runs under strategies k + offset, so that every loop has four of them and every strategy its share."""


def check(strategy: str, names: Sequence[str]) -> None:
    expected = read()
    faults = [cell.fault(expected.get((strategy, cell.loop), "?")) for cell in cells(strategy, names)]
    told = [fault for fault in faults if fault]
    assert not told, "\n".join([*told, "Rewrite the table with `python -m tests.loops.table` where this is meant."])


def share_of(strategy: str) -> list[str]:
    at, count = list(STRATEGIES).index(strategy), len(STRATEGIES)
    return [name for k, name in enumerate(LOOPS) if any((k + offset) % count == at for offset in OFFSETS)]


def test_the_table_knows_every_loop() -> None:
    assert {(strategy, loop) for strategy in STRATEGIES for loop in LOOPS} == read().keys()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loops_in_rotation(strategy: str) -> None:
    check(strategy, share_of(strategy))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_loop(strategy: str) -> None:
    check(strategy, list(LOOPS))
