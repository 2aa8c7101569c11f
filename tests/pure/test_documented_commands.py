"""Every command that README.md and docs/ show is run by a test, or marked with the date of a run by hand."""

from __future__ import annotations

import ast

from tests.documented import COVERED, PAGES, ROOT, RUN, TUTORIAL, shown

SHOWN = [command for page in PAGES for command in shown(page)]


def test_every_command_is_run_or_marked() -> None:
    known = {(page, line) for page, lines in RUN.items() for line in lines}
    unknown = [
        f"{each.page}: {each.line}"
        for each in SHOWN
        if not (each.marked or each.page == TUTORIAL or (each.page, each.line) in known or each.line in COVERED)
    ]
    assert not unknown, "\n".join(
        [*unknown, "Add them to RUN or COVERED in tests/documented.py, or `<!-- by hand: DATE -->` above their block."]
    )


def test_every_entry_is_shown() -> None:
    lines = {(each.page, each.line) for each in SHOWN if not each.marked}
    assert not {(page, line) for page, entries in RUN.items() for line in entries} - lines
    assert not COVERED.keys() - {each.line for each in SHOWN}


def test_covering_tests_exist() -> None:
    for file, _, name in (test.partition("::") for test in COVERED.values()):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"
