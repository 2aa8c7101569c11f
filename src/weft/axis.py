"""Answers and their spelling. A folder is an axis, a file is one answer, and the answer has the file's name.

    answer   = name [ "(" [ item { "," item } ] ")" ]
    item     = [ name "=" ] value         # only the first item may omit its name; it sets the first field
    value    = number [unit] | "inf" | "true" | "false" | string | answer

Folders on `WEFT_PATH`, laid out like the package (`DIR/compression/mine.py`), add the user's own answers.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import os
import re
import sys
import textwrap
import typing
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from weft.environment import UserSettings
from weft.errors import SpellingError, UserError, nearest
from weft.units import Size

AXES = ("partition", "optimization", "synchrony", "topology", "compression", "schedule")

DEFAULTS = {
    "partition": "replicated",
    "optimization": "gradient",
    "synchrony": "bsp",
    "topology": "direct",
    "compression": "dense",
    "schedule": "fused",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One published answer to one of the six questions: a value without run state."""

    axis: ClassVar[str]

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    @property
    def summary(self) -> str:
        """The first sentence of the answer's docstring."""
        return (inspect.getdoc(type(self)) or "").split("\n\n")[0].replace("\n", " ")

    def __str__(self) -> str:
        return spell(self)

    def spelled_out(self) -> dict[str, Any]:
        """Every field, for files: `{"name": "topk", "ratio": 0.01}`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = {
            k: v.spelled_out() if isinstance(v, Answer) else str(v) if isinstance(v, Size) else v
            for k, v in fields.items()
        }
        return {"name": self.name, **plain}


def spell(answer: Answer) -> str:
    """The canonical spelling: only arguments that differ from their default, by name; a wrapper's `inner` first."""
    items: list[str] = []
    for field in dataclasses.fields(answer):
        value = getattr(answer, field.name)
        if field.name == "inner":
            items.insert(0, _spell_value(value))
        elif value != field.default:
            items.append(f"{field.name}={_spell_value(value)}")
    return f"{answer.name}({', '.join(items)})" if items else answer.name


def _spell_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value or 0.0).removesuffix(".0")  # also "inf"; -0.0 is spelled as 0
    if isinstance(value, str) and not re.fullmatch(r"[a-z][a-z0-9_]*", value):
        return f'"{value}"'
    return str(value)


# --- discovery ------------------------------------------------------------------------------------------------------


def catalogue(axis: str) -> dict[str, type[Answer]]:
    """All answers of one axis, by name, from the package and from `WEFT_PATH`."""
    return _discover(UserSettings.from_env().path or "")[axis]


def find(name: str) -> type[Answer]:
    """The answer with this name on any axis. Raises SpellingError, which suggests the closest name."""
    everything = {n: kind for axis in AXES for n, kind in catalogue(axis).items()}
    if name == "auto":
        raise SpellingError("'auto' is reserved for the planner; name the answers, or omit the strategy")
    if name not in everything:
        raise SpellingError(f"there is no answer '{name}'{nearest(name, everything, listed_by='weft answers')}")
    return everything[name]


@functools.cache
def _discover(extra: str) -> dict[str, dict[str, type[Answer]]]:
    home = Path(__file__).parent
    found: dict[str, dict[str, type[Answer]]] = {axis: {} for axis in AXES}
    owner: dict[str, str] = {}
    for root in [home, *(Path(p) for p in extra.split(os.pathsep) if p)]:
        for axis in AXES:
            for file in sorted((root / axis).glob("[a-z]*.py")):
                if file.stem in owner:
                    raise UserError(f"two answers are called '{file.stem}': {owner[file.stem]} and {file}; rename one")
                owner[file.stem] = str(file)
                found[axis][file.stem] = _answer_in(_load(axis, file, own=root == home), axis)
    return found


def _load(axis: str, file: Path, *, own: bool) -> ModuleType:
    name = f"weft.{axis}.{file.stem}"
    if own or name in sys.modules:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"{file} cannot be loaded as an answer: {type(error).__name__}: {error}") from error
    return module


def _answer_in(module: ModuleType, axis: str) -> type[Answer]:
    """The one public answer class that a file of an axis defines."""
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Answer) and kind.__module__ == module.__name__
    ]
    kinds = [kind for kind in kinds if not kind.__name__.startswith("_")]
    if len(kinds) != 1:
        raise UserError(f"{module.__file__} defines {len(kinds)} answers; a file of {axis}/ holds exactly one")
    kind = kinds[0]
    if getattr(kind, "axis", None) != axis or inspect.isabstract(kind):
        raise UserError(f"{kind.__name__} in {module.__file__} does not satisfy the contract of {axis}/__init__.py")
    return kind


def field_docs(kind: type[Answer]) -> dict[str, str]:
    """The documentation of each field: the string below it. Inherited fields are included."""
    docs = {}
    bases = [base for base in reversed(kind.__mro__) if issubclass(base, Answer)]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(base))) for base in bases]
    body = [line for tree in trees for line in typing.cast(ast.ClassDef, tree.body[0]).body]
    for field, doc in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                docs[field.target.id] = inspect.cleandoc(str(doc.value.value))
    return docs


# --- making answers -------------------------------------------------------------------------------------------------


def make(kind: type[Answer], values: dict[str, Any]) -> Answer:
    """Build an answer from raw values, each converted to its field's type."""
    hints = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]
    name = kind.__module__.rpartition(".")[2]
    for key in values:
        if key not in known:
            raise SpellingError(f"{name} has no parameter '{key}'{nearest(key, known) if known else '; it takes none'}")
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise SpellingError(f"{name} needs {missing[0]}, as in {name}({missing[0]}=…)")
    try:
        return kind(**{key: _convert(value, hints[key], f"{name}'s {key}") for key, value in values.items()})
    except SpellingError:
        raise
    except ValueError as error:
        raise SpellingError(f"{name}: {error}") from None


def _convert(value: Any, hint: Any, what: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, Answer):
        return _convert_answer(value, hint, what)
    if typing.get_origin(hint) is typing.Literal:
        word = _word(value)
        if word not in typing.get_args(hint):
            raise SpellingError(f"{what} cannot be '{word}'{nearest(str(word), map(str, typing.get_args(hint)))}")
        return word
    if hint is Size:
        return Size.parse(str(_word(value)))
    if hint is bool and isinstance(value, bool):
        return value
    if hint in (int, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
        if hint is float or float(value).is_integer():
            return hint(value)
    if hint is str and isinstance(_word(value), str):
        return _word(value)
    raise SpellingError(f"{what} cannot be '{_word(value)}'; give {_KINDS.get(hint, str(hint))}")


_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _convert_answer(value: Any, hint: type[Answer], what: str) -> Answer:
    if isinstance(value, Answer):
        return value
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        value = Raw(value["name"], {k: v for k, v in value.items() if k != "name"})
    elif isinstance(value, str):
        value = parse_raw(value)
    if not isinstance(value, Raw):
        raise SpellingError(f"{what} cannot be '{value}'; give an answer such as {DEFAULTS[hint.axis]}")
    known = catalogue(hint.axis)
    if value.name not in known:
        raise SpellingError(f"{what} cannot be '{value.name}'{nearest(value.name, known)}")
    return value.build(known[value.name])


def _word(value: Any) -> Any:
    return value.name if isinstance(value, Raw) and not value.items else value


@dataclasses.dataclass
class Raw:
    """An answer as written: a name and its items. The unnamed first item has the key ''."""

    name: str
    items: dict[str, Any]

    def build(self, kind: type[Answer]) -> Answer:
        values = dict(self.items)
        if "" in values:
            fields = dataclasses.fields(kind)
            if not fields:
                raise SpellingError(f"{self.name} takes no parameters, but was given one")
            if fields[0].name in values:
                raise SpellingError(f"{self.name} was given {fields[0].name} twice")
            values = {fields[0].name: values.pop(""), **values}
        return make(kind, values)

    def __str__(self) -> str:
        return self.name


# --- parsing --------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""\s*(?:(?P<name>[a-z][a-z0-9_]*)
      |(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?P<unit>[A-Za-z]*)
      |(?P<string>"[^"]*"|'[^']*')|(?P<mark>[(),=]))""",
    re.VERBOSE,
)
_DEPTH = 20
_DIGITS = 40


def parse_raw(text: str) -> Raw:
    """Parse one answer as written, without looking up names."""
    tokens = _tokens(text)
    raw = _read_answer(tokens, text, 0)
    if tokens:
        rest = tokens[1:] if _next_is(tokens, ",") else tokens
        remedy = "write name(key=value, …)"
        if rest and rest[0][0] == "name":
            remedy = "separate answers by ' / ', as in 'bsp / ring'"
        raise SpellingError(f"'{text.strip()}' continues after its answer with '{tokens[0][1]}'; {remedy}")
    return raw


def _tokens(text: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            bad = text[at:].strip()[0]
            raise SpellingError(f"'{text.strip()}' cannot be parsed at '{bad}'; write name(key=value, …)")
        kind = match.lastgroup if match.lastgroup != "unit" else "number"
        if kind == "number" and match["unit"]:
            found.append(("size", match["number"] + match["unit"]))
        else:
            assert kind is not None
            found.append((kind, match[kind]))
        at = match.end()
    return found


def _read_answer(tokens: list[tuple[str, Any]], text: str, depth: int) -> Raw:
    if depth > _DEPTH:
        raise SpellingError(f"'{text[:40]}…' is nested deeper than {_DEPTH} answers")
    if not tokens or tokens[0][0] != "name":
        raise SpellingError(f"'{text.strip()}' lacks the name of an answer; write name(key=value, …)")
    raw = Raw(tokens.pop(0)[1], {})
    if not _next_is(tokens, "("):
        return raw
    tokens.pop(0)
    while tokens and not _next_is(tokens, ")"):
        key = ""
        if tokens[0][0] == "name" and _next_is(tokens[1:], "="):
            key = tokens[0][1]
            del tokens[:2]
        elif raw.items:
            raise SpellingError(f"'{text.strip()}': only the first item of {raw.name} may omit its name")
        if key in raw.items:
            raise SpellingError(f"'{text.strip()}' gives {raw.name} its {key} twice")
        raw.items[key] = _read_value(tokens, text, depth)
        if _next_is(tokens, ","):
            tokens.pop(0)
        elif tokens and not _next_is(tokens, ")"):
            raise SpellingError(f"'{text.strip()}' has '{tokens[0][1]}' where a comma or bracket is expected")
    if not tokens:
        raise SpellingError(f"'{text.strip()}' lacks a closing bracket after {raw.name}")
    tokens.pop(0)
    return raw


def _next_is(tokens: list[tuple[str, Any]], mark: str) -> bool:
    return bool(tokens) and tokens[0] == ("mark", mark)


def _read_value(tokens: list[tuple[str, Any]], text: str, depth: int) -> Any:
    if not tokens:
        raise SpellingError(f"'{text.strip()}' ends where a value is expected")
    kind, value = tokens[0]
    if kind == "name" and value not in ("inf", "true", "false"):
        return _read_answer(tokens, text, depth + 1)
    if kind == "mark":
        raise SpellingError(f"'{text.strip()}' has '{value}' where a value is expected")
    tokens.pop(0)
    if kind == "name":
        return {"inf": math.inf, "true": True, "false": False}[value]
    if kind == "number":
        if len(value) > _DIGITS:
            raise SpellingError(f"'{value[:20]}…' is a number of {len(value)} characters; {_DIGITS} are enough")
        return int(value) if re.fullmatch(r"[+-]?\d+", value) else float(value)
    return value if kind == "size" else value[1:-1]
