"""Documents name files, functions, commands, variables and pages that exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

import weft
from weft.axis import AXES, catalogue
from weft.cli import COMMANDS, app
from weft.strategy import Strategy

SOURCE = Path(weft.__file__).parent
ROOT = Path(__file__).parents[2]
HOPS = re.findall(r"(?m)^\| `([\w.]+)` \| `([\w/.]+)` \|", (ROOT / "docs/concepts.md").read_text(encoding="utf-8"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
HOMES = (ROOT, ROOT / "docs", ROOT / "src", SOURCE, SOURCE / "transport/messaging")
"""Folders that the paths of a document are relative to."""


def names(file: Path) -> set[str]:
    """Functions and classes of a file, and methods as Class.method."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@cache
def text_of(folder: str, pattern: str) -> str:
    return "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / folder).rglob(pattern)))


def commands(page: Path) -> list[list[str]]:
    """The words of each `weft …` on a page, in a line of its own or in backticks, without the job's arguments."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"(?m)^\s*(?:\$ )?((?:\.venv/bin/)?weft [a-z].*)$", text) + re.findall(
        r"`(weft [a-z][^`]*)`", text
    )
    split = [re.split(r"\s#|\s{3,}|;", line)[0] for line in found]
    return [shlex.split(line.partition(" -- ")[0])[1:] for line in split if balanced(line)]


def balanced(line: str) -> bool:
    return line.count('"') % 2 == line.count("'") % 2 == 0


def test_both_walks_are_there() -> None:
    assert len(HOPS) > 20


@pytest.mark.parametrize(("name", "file"), HOPS, ids=[f"{name}-{file}" for name, file in HOPS])
def test_each_hop_of_the_walks_exists(name: str, file: str) -> None:
    assert name in names(SOURCE / file)


@every_page
def test_files_exist(page: Path) -> None:
    """Paths in backticks; `job.py`, `loop.py` and the folder `mine` belong to a user."""
    named = set(re.findall(r"`(?:python3? )?([\w./]*\w\.(?:py|cpp|md))[`\s]", page.read_text(encoding="utf-8")))
    tests = {file.name for file in (ROOT / "tests").rglob("*.py")}
    ours = {name for name in named - tests if name not in ("job.py", "loop.py") and not name.startswith("mine/")}
    assert not {name for name in ours if not any((home / name).exists() for home in HOMES)}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    for path, anchor in links:
        to = page.parent / path if path else page
        assert to.exists(), path
        assert not anchor or anchor in anchors(to), f"{path}#{anchor}"


@every_page
def test_environment_variables_are_read_somewhere(page: Path) -> None:
    named = set(re.findall(r"\bWEFT_[A-Z_]+\b", page.read_text(encoding="utf-8")))
    assert not [name for name in named if name not in text_of("src", "*.py") + text_of("tests", "*.py")]


@every_page
def test_commands_have_the_options_that_are_shown(page: Path) -> None:
    for name in COMMANDS:
        importlib.import_module(f"weft.cli.{name}")
    for words in commands(page):
        command: Any = typer.main.get_command(app)
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, words
            command, words = command.commands[words[0]], words[1:]
        known = {option for each in command.params for option in each.opts} | {"--help", "-h"}
        assert {word for word in words if re.match(r"--?[a-z]", word)} <= known, words
        for strategy in [word for word in words if " / " in word] * (page.name != "CONTRIBUTING.md"):
            Strategy.parse(strategy)


def test_the_table_of_questions_names_every_answer() -> None:
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    for axis in AXES:
        row = re.search(rf"(?m)^\| `{axis}/` \|[^|]*\|([^|]*)\|", text)
        assert row is not None, axis
        own = {name for name, kind in catalogue(axis).items() if kind.__module__.startswith("weft.")}
        assert own <= set(re.findall(r"\w+", row[1])), axis


def test_other_measurements_are_dated_and_listed() -> None:
    listed = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    for file in (ROOT / "docs/results").iterdir():
        assert re.match(r"\d{4}-\d\d-\d\d-", file.name) and f"(results/{file.name})" in listed
        assert re.search(r"`(?:PYTHONPATH=src )?(?:weft compare|python3?) ", file.read_text(encoding="utf-8")), (
            file.name
        )


def test_the_landing_page_leads_to_every_page() -> None:
    entries = set(re.findall(r"(?m)^(?:\w+ <)?([\w./]+)>?$", (ROOT / "docs/index.md").read_text(encoding="utf-8")))
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert entries == pages | {"../README", "../CONTRIBUTING", "../CHANGELOG"}


def test_the_glossary_names_files_that_exist() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = "".join(line for line in text.splitlines() if line.startswith("|"))
    missing = [path for path in re.findall(r"`([\w/]+/|[\w/]+\.py)`", rows) if not (SOURCE / path).exists()]
    assert not missing
