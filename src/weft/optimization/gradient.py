from __future__ import annotations

from dataclasses import dataclass
from typing import final

from weft.optimization import Optimization


@final
@dataclass(frozen=True, kw_only=True)
class Gradient(Optimization):
    """One logical optimizer: every worker steps the same one with the mean gradient."""
