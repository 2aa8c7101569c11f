"""The surveyed systems as named strategies: which of them run, and what the others still need."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from weft.errors import UserError, nearest
from weft.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class System:
    """One surveyed system. `strategy` is None unless it runs, at least partly."""

    id: str
    aliases: tuple[str, ...]
    name: str
    group: str
    surveys: tuple[int, ...]
    status: Literal["runs", "partly", "planned", "outside"]
    strategy: str | None
    note: str

    @property
    def missing(self) -> str:
        """Where it runs in part: the sentence of the note that says what is missing, which is the last."""
        return re.split(r"(?<=\.) (?=[A-Z])", self.note)[-1]

    def row(self) -> dict[str, Any]:
        return asdict(self)


SURVEY4 = ("bsp_ps", "wfbp_ps", "bytescheduler_ps", "bsp_a2a", "wfbp_a2a", "mg_wfbp", "bytescheduler_a2a")
"""The seven methods whose throughput one of the surveys measures [Shi et al. 2020]."""


@functools.cache
def catalogue() -> tuple[System, ...]:
    """The 157 systems of the surveys, and three that they do not name; in the order of the surveys' groups."""
    rows = json.loads((Path(__file__).parent / "catalogue.json").read_text(encoding="utf-8"))
    return tuple(System(**row | {k: tuple(row[k]) for k in ("aliases", "surveys")}) for row in rows)


def names() -> list[str]:
    """The ids and aliases of all systems."""
    return [name for name, _ in _names()]


def is_known(name: str) -> bool:
    """Whether a system has this id or alias."""
    return name in dict(_names())


def find(name: str) -> System:
    """The system with this id or alias."""
    known = dict(_names())
    if name not in known:
        raise UserError(f"there is no system '{name}'{nearest(name, known, listed_by='weft systems')}")
    return known[name]


def strategy(name: str) -> Strategy:
    """The strategy that a system's name stands for, or why there is none yet."""
    system = find(name)
    if system.strategy is None:
        outside = system.status == "outside"
        reason = "lies outside of what Weft trains" if outside else "is planned, but does not run yet"
        raise UserError(
            f"{system.name} {reason}; see `weft systems {system.id}`, or `weft systems --status runs` for others"
        )
    return Strategy.parse(system.strategy)


def _names() -> Iterator[tuple[str, System]]:
    for system in catalogue():
        for name in (system.id, *system.aliases):
            yield name, system
