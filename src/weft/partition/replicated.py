from __future__ import annotations

from dataclasses import dataclass
from typing import final

from weft.partition import Partition


@final
@dataclass(frozen=True, kw_only=True)
class Replicated(Partition):
    """Every worker holds the whole model (data parallelism)."""
