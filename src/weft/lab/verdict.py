"""The result of a comparison in a sentence or two, and the remarks that limit it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.lab.learning import as_dense
from weft.lab.rows import Result, Row, by_step, one_host_row, rows_of
from weft.lab.words import counted, listed, ms, times

_OTHER_SHARE, _OTHER_CORES = 0.1, 0.5
"""Other processes disturb a comparison beyond this share of the processors, or beyond this number of cores."""
_MEASURING_ERROR = 1.05


def ranked(result: Result) -> list[Row]:
    """The rows that finished, fastest first; rows that computed in another way than the rest do not compete."""
    done = [row for row in rows_of(result) if row.finished]
    return by_step([row for row in done if row.compute == result["compute"]] or done)


def headline(result: Result) -> str:
    """Which way to use, or none. A difference within the spread is not called one, whatever its sign."""
    rows, order = rows_of(result), ranked(result)
    if not order:
        return f"{rows[0].name} did not finish" if len(rows) == 1 else f"None of the {len(rows)} rows finished"
    failed = sum(1 for row in rows if not row.finished)
    return _Verdict(result, order).text() + (f"; {failed} of {len(rows)} rows did not finish" if failed else "")


def fastest(result: Result) -> Row | None:
    """The row that the headline calls fastest; None without a clear winner."""
    order = ranked(result)
    return _Verdict(result, order).winner() if order else None


class _Verdict:
    """The headline of rows that finished, fastest first."""

    def __init__(self, result: Result, order: Sequence[Row]) -> None:
        self.result, self.order, self.best = result, order, order[0]
        self.one_host = None if superlinear(result) else one_host_row(result)
        self.level = [row for row in order if _level(self.best, row)]

    def winner(self) -> Row | None:
        """Of the rows within the spread of the fastest, the first that learns as dense training does, if any does."""
        if len(self.level) == len(self.order) > 1:
            return None
        return next((row for row in self.level if as_dense(row.learning)), self.best)

    def text(self) -> str:
        winner = self.winner()
        if winner is None:
            return self._no_winner()
        if self.one_host is not None and _faster(self.one_host, winner):
            return self._one_host(f"{times(_ratio(self.one_host, winner))} times as fast", winner)
        if self.one_host is not None and _learns_worse(winner) and _level(self.one_host, winner):
            return f"{self._one_host('as fast', winner)}, whose {_held_out(winner)}"
        return self._winner(winner)

    def _one_host(self, as_fast: str, winner: Row) -> str:
        where = "these links" if self.result["cluster"]["links"] else "this machine"
        rank = f", the fastest of {len(self.order)}" if len(self.order) > 1 else ""
        return f"Do not distribute this job on {where}: one host alone is {as_fast} as {winner.name}{rank}"

    def _no_winner(self) -> str:
        first, last = ms(_step_s(self.order[0])), ms(_step_s(self.order[-1]))
        many = "both" if len(self.order) == 2 else f"all {counted(len(self.order))}"
        text = f"No clear winner: {many} are within the spread ({first} to {last} ms a step)"
        if self.one_host is None:
            return text
        if _faster(self.one_host, self.best):
            return f"{text}; one host alone is faster: {ms(_step_s(self.one_host))} ms"
        if _level(self.one_host, self.best):
            return f"{text}; one host alone is as fast"
        return f"{text}; each is about {_against(self.best, self.one_host)}"

    def _winner(self, chosen: Row) -> str:
        others = [row.name for row in self.level if row is not chosen]
        level = f", level with {listed(others)} within the spread" if others else ""
        text = f"{chosen.name} takes " if len(self.order) == 1 else f"{chosen.name} is fastest{level}: "
        text += self._speed(chosen)
        if as_dense(chosen.learning):
            return text
        text += f", but {_learns(chosen)}"
        dense = next((row for row in self.order if as_dense(row.learning)), None)
        if dense is None:
            return text
        if self.one_host is not None and _faster(self.one_host, dense):
            return f"{text}; of all that learn as dense training does, one host alone is the fastest"
        return f"{text}; the fastest that learns as dense training does is {dense.name}: {self._speed(dense)}"

    def _speed(self, row: Row) -> str:
        """`527 ms a step, 2.8 times as fast as ddp and 1.9 times as fast as one host alone`."""
        slower = [other for other in self.order if _step_s(other) > _step_s(row) and other not in self.level]
        other_kind = [other for other in slower if other.kind != row.kind]
        known = [*(other_kind or slower)[:1], *([self.one_host] if self.one_host is not None else [])]
        words = [_against(row, other) for other in known]
        return f"{ms(_step_s(row))} ms a step" + (f", {' and '.join(words)}" if words else "")


def _against(row: Row, other: Row) -> str:
    if _level(row, other):
        return f"no faster than {other.name}"
    return f"{times(_ratio(row, other))} times as fast as {other.name}"


def _learns(row: Row) -> str:
    if row.learning is None:
        return "how it learns has not been measured"
    return f"its {_held_out(row)}"


def _learns_worse(row: Row) -> bool:
    return row.learning is not None and not as_dense(row.learning)


def _held_out(row: Row) -> str:
    assert row.learning is not None
    return f"held-out loss was {100 * (row.learning - 1):.0f} % above dense training's in our measurement"


def _ratio(row: Row, other: Row) -> float:
    """How many times as fast as the other a row is, in samples per second."""
    assert row.samples_per_s is not None and other.samples_per_s is not None
    return row.samples_per_s / other.samples_per_s


def _level(one: Row, other: Row) -> bool:
    return abs(_step_s(other) - _step_s(one)) <= (one.step_s_spread or 0) + (other.step_s_spread or 0)


def _faster(one: Row, other: Row) -> bool:
    return _step_s(one) < _step_s(other) and not _level(one, other)


def _step_s(row: Row) -> float:
    """The step of a row that finished."""
    assert row.step_s is not None
    return row.step_s


# --- remarks --------------------------------------------------------------------------------------------------------


def remarks(result: Result) -> list[str]:
    """What makes figures of this result doubtful, a sentence each."""
    done = [row for row in rows_of(result) if row.finished]
    found = []
    if busy(result["machine"]):
        found.append(
            f"Other processes used {100 * result['machine']['other_cpu_share']:.0f} % of this machine's processors "
            "during the runs: figures are not comparable; repeat on an idle machine"
        )
    if fast := superlinear(result):
        found.append(
            f"The speed-up of {listed([row.name for row in fast])} exceeds the number of hosts: the measurement of one "
            "host was disturbed"
        )
    if unbounded := [row.name for row in done if row.bound_s is None]:
        names = f" for {listed(unbounded)}" if len(unbounded) < len(done) else ""
        found.append(f"No bound{names}: the measured step is shorter than computing alone, so computing was disturbed")
    if wide := [row.name for row in done if (row.step_s_spread or 0) > _step_s(row)]:
        found.append(f"The spread of {listed(wide)} exceeds the step; repeat with more --steps or --seeds")
    return found


def busy(machine: dict[str, Any]) -> bool:
    """Whether other processes used enough of the processors to disturb the figures."""
    share = machine["other_cpu_share"]
    return share is not None and share > min(_OTHER_SHARE, _OTHER_CORES / machine["cores"])


def superlinear(result: Result) -> list[Row]:
    """Rows whose speed-up exceeds the number of hosts, beyond measuring error."""
    most = _MEASURING_ERROR * result["cluster"]["hosts"]
    return [row for row in rows_of(result) if row.finished and (row.speedup or 0) > most]
