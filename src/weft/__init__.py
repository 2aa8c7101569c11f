"""Weft: distribute PyTorch training with one line, and compare strategies on emulated links of your speed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.errors import Conflict, JobError, LoopError, PeerLost, SpellingError, UserError, WeftError
    from weft.lab.compare import Comparison, compare
    from weft.runtime.run import Run, init
    from weft.store.model import load
    from weft.strategy import Strategy

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "Conflict",
    "JobError",
    "LoopError",
    "PeerLost",
    "Run",
    "SpellingError",
    "Strategy",
    "UserError",
    "WeftError",
    "__version__",
    "compare",
    "init",
    "load",
]

_HOMES = {
    "Comparison": "weft.lab.compare",
    "Run": "weft.runtime.run",
    "Strategy": "weft.strategy",
    "compare": "weft.lab.compare",
    "init": "weft.runtime.run",
    "load": "weft.store.model",
}


def __getattr__(name: str) -> Any:
    """Public names, imported when first used: what keeps the lab's namespaces must not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'weft' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES.get(name, "weft.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
