"""Documents name files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import weft

SOURCE = Path(weft.__file__).parent
ROOT = Path(__file__).parents[2]
HOPS = re.findall(r"(?m)^\| `([\w.]+)` \| `([\w/.]+)` \|", (ROOT / "docs/concepts.md").read_text(encoding="utf-8"))


def names(file: Path) -> set[str]:
    """Functions and classes of a file, and methods as Class.method."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_both_walks_are_there() -> None:
    assert len(HOPS) > 20


@pytest.mark.parametrize(("name", "file"), HOPS, ids=[f"{name}-{file}" for name, file in HOPS])
def test_each_hop_of_the_walks_exists(name: str, file: str) -> None:
    assert name in names(SOURCE / file)


def test_the_glossary_names_files_that_exist() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = "".join(line for line in text.splitlines() if line.startswith("|"))
    missing = [path for path in re.findall(r"`([\w/]+/|[\w/]+\.py)`", rows) if not (SOURCE / path).exists()]
    assert not missing
