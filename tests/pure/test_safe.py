"""Safe by default: nothing that could run code is read from a file or a wire."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft

FILES = sorted(Path(weft.__file__).parent.rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "multiprocessing"}
CALLS = {"eval", "exec", "__import__"}
ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("numpy", "load"),
    ("np", "load"),
}


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names if each.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield name
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in ATTRIBUTES:
                yield f"{owner}.{name}"
            case ast.Attribute(attr=name) if name.endswith(("_object", "_object_list")):
                yield f"{name}: the collective library pickles objects"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FILES[0].parent)))
def test_no_pickle_and_no_evaluation(file: Path) -> None:
    assert not list(offences(ast.parse(file.read_text(encoding="utf-8"))))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "dist.all_gather_object(a, b)",
        "dist.broadcast_object_list(a)",
        "from multiprocessing import connection",
    ],
)
def test_the_test_would_see_it(source: str) -> None:
    assert list(offences(ast.parse(source)))
