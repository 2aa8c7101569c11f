"""State as plain values: a tree that JSON represents exactly, and tensors by name. It cannot contain code.

A tree has JSON's own values, and objects with one tag each for values that JSON lacks:

    {"map": {...}}  {"pairs": [[key, value], ...]}  {"counter": [...]}  {"tuple": [...]}
    {"tensor": "optimizer/state/0/exp_avg"}  {"float": "inf"}  {"bytes": "00ff"}  {"dtype": "float32"}
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from weft.errors import UserError
from weft.lazy import numpy, torch

if TYPE_CHECKING:
    from torch import Tensor

Tree = Any
_DEEPEST = 64


def plain(value: Any, name: str, tensors: dict[str, Tensor]) -> Tree:
    """The tree of a value. Its tensors are added to `tensors`, under names that begin with `name`."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return value if math.isfinite(value) else {"float": repr(float(value))}
        case torch.Tensor():
            while name in tensors:  # "a/b" of one mapping may collide with "b" of another's "a"
                name += "'"
            tensors[name] = value.detach()
            return {"tensor": name}
        case numpy.ndarray():
            return plain(torch.from_numpy(value.copy()), name, tensors)
        case numpy.generic():
            return plain(value.item(), name, tensors)
        case list():
            return [plain(each, f"{name}/{at}", tensors) for at, each in enumerate(value)]
        case tuple():
            return {"tuple": [plain(each, f"{name}/{at}", tensors) for at, each in enumerate(value)]}
        case bytes():
            return {"bytes": value.hex()}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case Mapping() if not isinstance(value, Counter) and all(isinstance(key, str) for key in value):
            return {"map": {key: plain(each, f"{name}/{key}", tensors) for key, each in value.items()}}
        case Mapping():
            pairs = [[plain(key, name, {}), plain(each, f"{name}/{key}", tensors)] for key, each in value.items()]
            return {"counter" if isinstance(value, Counter) else "pairs": pairs}
    raise UserError(
        f"{name.replace('/', '.')} is a {type(value).__name__}, which a checkpoint cannot hold; keep numbers, text, "
        "tensors, and lists and dicts of them"
    )


def value(tree: Tree, tensors: Mapping[str, Tensor], depth: int = 0) -> Any:
    """The value of a tree. Raises ValueError if `plain` cannot have made the tree."""
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")

    def inner(tree: Tree) -> Any:
        return value(tree, tensors, depth + 1)

    if isinstance(tree, list):
        return [inner(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1:
        raise ValueError(f"an object with {len(tree)} keys instead of one tag")
    (tag, held), *_ = tree.items()
    match tag, held:
        case "map", dict():
            return {key: inner(each) for key, each in held.items()}
        case "pairs" | "counter", list() if all(isinstance(pair, list) and len(pair) == 2 for pair in held):
            pairs = {_hashable(inner(key)): inner(each) for key, each in held}
            return Counter(pairs) if tag == "counter" else pairs
        case "tuple", list():
            return tuple(inner(each) for each in held)
        case "tensor", str() if held in tensors:
            return tensors[held]
        case "float", "inf" | "-inf" | "nan":
            return float(held)
        case "bytes", str():
            return bytes.fromhex(held)
        case "dtype", str() if isinstance(getattr(torch, held, None), torch.dtype):
            return getattr(torch, held)
    raise ValueError(f"'{str(tag)[:40]}' with {str(held)[:40]!r}")


def tensors_in(tree: Tree) -> Iterator[str]:
    """The names of the tensors that a tree refers to, at any depth."""
    open_trees = [tree]
    while open_trees:
        match open_trees.pop():
            case list(trees):
                open_trees += trees
            case {"map": dict(entries)}:
                open_trees += entries.values()
            case {"pairs": list(trees)} | {"counter": list(trees)} | {"tuple": list(trees)}:
                open_trees += trees
            case {"tensor": str(name)}:
                yield name


def _hashable(key: Any) -> Any:
    try:
        hash(key)
    except TypeError:
        raise ValueError(f"a key that is a {type(key).__name__}") from None
    return key
