"""Words that were replaced by the field's terms stay out of the source and the documentation."""

from __future__ import annotations

import re
import tokenize
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import weft

HOME = Path(weft.__file__).parent
ROOT = Path(__file__).parents[2]
Uses = dict[str, int]
RETIRED = {
    "owed": "residual",
    "debt": "residual",
    "adds_up": "fuses_residual",
    "homes": "server_hosts",
    "teams": "groups",
    "keepers": "num_shards",
    "forgoes": "survives_worker_loss",
    "lessons": "calibration",
    "Seen": "Measured",
    "unread": "finite_gpu",
    "put_back": "restore",
    "strangers": "untracked_schedulers",
    "most_bytes": "max_frame_bytes",
    "even_here": "encrypt_loopback",
    "asked": "step_called, termination_requested or pull_pending",
    "Way": "BundleRoute",
    "room": "scratch",
    "desk": "rendezvous",
    "Desk": "Rendezvous",
    "joining": "external_ranks",
    "book": "issue_order",
    "Late": "LazyParameter",
    "LeftError": "Terminated",
    "Passage": "BucketExchange",
}
"""Each retired name, and the name to use."""
ALIASES = {("topology/__init__.py", "homes")}
"""Names that are kept for one release."""
RETIRED_WORDS = {*RETIRED, "whoever"} - {
    "Late",
    "Seen",
    "Way",
    "asked",
    "book",
    "joining",
    "room",
    "strangers",
    "unread",
}
"""Retired words of the documentation; the others are plain English."""


def names_in_the_source() -> Uses:
    """By module and name, the number of tokens."""
    found: Counter[str] = Counter()
    for file in sorted(HOME.rglob("*.py")):
        place = str(file.relative_to(HOME))
        with file.open("rb") as source:
            names = [token.string for token in tokenize.tokenize(source.readline) if token.type == tokenize.NAME]
        found.update(f"{place}: {name}" for name in names if name in RETIRED and (place, name) not in ALIASES)
    return dict(found)


def words_in_the_documentation() -> Uses:
    """By page and word, the number of uses."""
    found: Counter[str] = Counter()
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        words = re.findall(r"\w+", file.read_text(encoding="utf-8"))
        found.update(f"{file.relative_to(ROOT)}: {word}" for word in words if word in RETIRED_WORDS)
    return dict(found)


@pytest.mark.parametrize("uses", [names_in_the_source, words_in_the_documentation])
def test_retired_words_are_not_used(uses: Callable[[], Uses]) -> None:
    found = [f"{place}, {count} times" for place, count in uses().items()]
    assert not found, "\n".join([*found, "The terms to use are in RETIRED."])
