"""torch and numpy, imported when first used, so that a strategy is described and checked without them.

    from weft.lazy import torch

Each attribute is looked up once. From then on it is an attribute of a plain module, at the usual cost.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


def _lazy(name: str) -> ModuleType:
    """A module whose attributes are those of another one, which the first of them imports."""
    module = ModuleType(name)

    def look_up(attribute: str) -> Any:
        value = getattr(importlib.import_module(name), attribute)
        setattr(module, attribute, value)
        return value

    module.__dict__["__getattr__"] = look_up
    return module


if TYPE_CHECKING:
    import numpy as numpy
    import torch as torch
else:
    numpy, torch = _lazy("numpy"), _lazy("torch")
