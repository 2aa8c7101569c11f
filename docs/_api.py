"""The page `api.md`, from signatures and docstrings of the public names."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any

import weft
from weft import numerics
from weft.errors import WeftError
from weft.lab.spec import CompareSpec

HEAD = """\
# API

*Generated from the docstrings by `make docs`.* The [tutorial](tutorial.md) shows the calls of a training loop in order.
"""
FUNCTIONS = ("init", "compare")
WIDTH = 100


def api() -> str:
    """The text of the page."""
    public = {name: getattr(weft, name) for name in weft.__all__ if not name.startswith("_")}
    errors = {name: each for name, each in public.items() if isinstance(each, type) and issubclass(each, WeftError)}
    functions = {name: each for name, each in public.items() if inspect.isfunction(each)}
    classes = {name: each for name, each in public.items() if name not in {*errors, *functions}}
    parts = [HEAD]
    for name in ("init", *sorted(functions.keys() - {"init"})):
        parts += [f"## `weft.{name}`", *_function(functions[name], f"weft.{name}")]
        if name == "compare":
            parts.append(_options(CompareSpec))
    for name in ("Run", *sorted(classes.keys() - {"Run"})):
        parts += [f"## `weft.{name}`", *_class(classes[name])]
    parts += ["## Errors", "Every error that Weft raises on purpose derives from `weft.WeftError`.", _errors(errors)]
    parts += ["## `weft.numerics`", _paragraphs(numerics)]
    for name in numerics.__all__:
        kind = getattr(numerics, name)
        parts += [f"### `weft.numerics.{name}`", _signature(kind, f"weft.numerics.{name}"), _paragraphs(kind)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _function(function: Any, shown: str) -> Iterator[str]:
    yield _signature(function, shown)
    yield _paragraphs(function)


def _class(kind: type) -> Iterator[str]:
    yield _paragraphs(kind)
    docs = field_docs(kind)
    fields = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    named = [f"- `{name}: {_annotation(kind, name)}`{_colon(docs.get(name))}" for name in fields]
    named += [f"- `{name}`: {doc}" for name, doc in docs.items() if name not in fields]
    named += [
        f"- `{name}: {value.fget.__annotations__['return']}`{_colon(inspect.getdoc(value))}"
        for name, value in _public(kind)
        if isinstance(value, property) and value.fget is not None
    ]
    if named:
        yield "\n".join(named)
    for name, value in _public(kind):
        if isinstance(value, classmethod | staticmethod) or inspect.isfunction(value):
            shown = f"{kind.__name__}.{name}" if isinstance(value, classmethod) else f"{kind.__name__.lower()}.{name}"
            yield f"### `{shown}`"
            yield from _function(getattr(kind, name), shown)


def _public(kind: type) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(kind).items() if not name.startswith("_"))


def _annotation(kind: type, name: str) -> str:
    return str(kind.__annotations__[name])


def _signature(what: Any, shown: str) -> str:
    """A call with its parameters and defaults; one line for each parameter where they do not fit into one."""
    signature = inspect.signature(what)
    items: list[str] = []
    star = False
    for name, each in signature.parameters.items():
        if name == "self":
            continue
        prefix = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        if each.kind is each.KEYWORD_ONLY and not star:
            items.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        hint = "" if each.annotation is each.empty else f": {each.annotation}"
        default = "" if each.default is each.empty else f" = {_default(each.default)}"
        items.append(f"{prefix}{name}{hint}{default}")
    returns = signature.return_annotation
    tail = "" if returns in (signature.empty, None) or isinstance(what, type) else f" -> {returns}"
    text = f"{shown}({', '.join(items)}){tail}"
    if len(text) > WIDTH:
        text = f"{shown}(\n" + "".join(f"    {item},\n" for item in items) + f"){tail}"
    return f"```python\n{text}\n```"


def _default(value: Any) -> str:
    return "..." if inspect.isfunction(value) or inspect.isclass(value) else repr(value)


def _paragraphs(what: Any) -> str:
    return inspect.getdoc(what) or ""


def _colon(doc: str | None) -> str:
    return f": {' '.join(doc.split())}" if doc else ""


def _options(kind: type) -> str:
    docs = field_docs(kind)
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(kind):
        if field.name in ("job", "contenders", "command"):
            continue
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        hint = str(field.type).replace("|", "\\|")
        rows.append(f"| `{field.name}` | `{hint}` | `{made!r}` | {docs.get(field.name, '')} |")
    return "\n".join(rows)


def field_docs(kind: type) -> dict[str, str]:
    """The string below each annotated field of a class, and below each attribute that `__init__` sets, in one line."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    init = [node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    docs = {}
    for body in (tree.body, *init):
        for field, doc in itertools.pairwise(body):
            if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                for target in _targets(field):
                    docs[target] = " ".join(str(doc.value.value).split())
    return docs


def _targets(field: ast.stmt) -> list[str]:
    """The name of `name: type` or of `self.name = value`."""
    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
        return [field.target.id]
    targets = field.targets if isinstance(field, ast.Assign) else []
    return [target.attr for target in targets if isinstance(target, ast.Attribute)]


def _errors(errors: dict[str, type]) -> str:
    rows = ["| error | derives from | meaning |", "|---|---|---|"]
    for name, kind in errors.items():
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        rows.append(f"| `weft.{name}` | {bases} | {' '.join((inspect.getdoc(kind) or '').split())} |")
    return "\n".join(rows)
