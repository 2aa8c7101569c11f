"""Weft: a way of distributing PyTorch training is one value. Run it, compare it, name it after a published system."""

from __future__ import annotations

from weft.errors import Conflict, JobError, LoopError, PeerLost, SpellingError, UserError, WeftError
from weft.strategy import Strategy

__version__ = "0.1.0"

from weft.runtime.worker import Run, init

__all__ = [
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
    "init",
]
