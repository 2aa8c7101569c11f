"""The shape of the source: sizes of modules, classes and functions, and branches that belong elsewhere."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import weft
from weft.axis import AXES, catalogue

HOME = Path(weft.__file__).parent
Sizes = dict[str, int]
KINDS_OF_RUN = {"_among_servers", "_shares_memory", "shares_memory", "accrues", "wrapper", "alone"}
KINDS_OF_RUN |= {"_gradients", "gradients", "_served", "served"}
"""Names by which the runtime asks for the kind of run, in place of a method of its mode."""


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The syntax of every module, by its path; kernels are exempt."""
    files = [file for file in sorted(HOME.rglob("*.py")) if file.parent.name != "kernels"]
    return {str(file.relative_to(HOME)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def lines_of_modules() -> Sizes:
    return {name: len((HOME / name).read_text(encoding="utf-8").splitlines()) for name in modules()}


def lines_of(*kinds: type[ast.AST]) -> Sizes:
    """The lines of each class or function, decorators not counted."""
    sizes: Sizes = {}

    def visit(node: ast.AST, place: str) -> None:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{place}.{inner.name}"
                if isinstance(inner, kinds):
                    assert inner.end_lineno is not None
                    sizes[name] = max(sizes.get(name, 0), inner.end_lineno - inner.lineno + 1)
                visit(inner, name)
            else:
                visit(inner, place)

    for name, tree in modules().items():
        visit(tree, name)
    return sizes


def isinstance_with_an_answers_class() -> Sizes:
    """By module, `isinstance` and `case` with an answer's class, outside of the answer's folder and the registry."""
    folder = {kind.__name__: axis for axis in AXES for kind in catalogue(axis).values()}
    found: Counter[str] = Counter()
    for name, tree in modules().items():
        own = {
            kind for kind in _imported(tree) if name.partition("/")[0] in (folder.get(kind), "axis.py", "strategy.py")
        }
        found[name] = sum(kind in folder for kind in _tested_classes(tree) if kind in _imported(tree) - own)
    return dict(found)


def _imported(tree: ast.Module) -> set[str]:
    """Names from other modules of weft."""
    within = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {each.name for node in within if str(node.module).startswith("weft.") for each in node.names}


def _tested_classes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            yield from (part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name))
        elif isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name):
            yield node.cls.id


def lines_of_run() -> Sizes:
    return {"runtime/run.py": lines_of_modules()["runtime/run.py"]}


def files_beside_the_folders_of_runtime() -> Sizes:
    return {file.name: 1 for file in (HOME / "runtime").glob("*.py") if file.name not in ("__init__.py", "run.py")}


def branches_on_the_kind_of_run() -> Sizes:
    """By module of the runtime, conditions that ask for the kind of run; `modes/` is the place for them."""
    found: Counter[str] = Counter()
    for name, tree in modules().items():
        if name.startswith("runtime/") and not name.startswith("runtime/modes/"):
            found[name] = sum(bool(_names(condition) & KINDS_OF_RUN) for condition in _conditions(tree))
    return dict(found)


def _conditions(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def _names(tree: ast.expr) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


CHECKS: dict[str, tuple[int, Callable[[], Sizes]]] = {
    "lines of a module": (400, lines_of_modules),
    "lines of the file to read first": (200, lines_of_run),
    "lines of a class": (250, lambda: lines_of(ast.ClassDef)),
    "lines of a function": (60, lambda: lines_of(ast.FunctionDef, ast.AsyncFunctionDef)),
    "tests of an answer's class": (0, isinstance_with_an_answers_class),
    "files beside the folders of runtime/": (0, files_beside_the_folders_of_runtime),
    "branches on the kind of run outside of modes/": (0, branches_on_the_kind_of_run),
}
"""The limit of each check, and the function that measures."""


@pytest.mark.parametrize("check", CHECKS)
def test_shape(check: str) -> None:
    limit, sizes = CHECKS[check]
    today = sizes()
    largest = sorted(today.items(), key=lambda item: -item[1])[:5]
    print(f"{check}, at most {limit}; the largest: {', '.join(f'{name} {size}' for name, size in largest)}")
    assert not [f"{name}: {size}" for name, size in today.items() if size > limit]
