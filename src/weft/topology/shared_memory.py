from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from weft.topology import MemoryTopology


@final
@dataclass(frozen=True, kw_only=True)
class SharedMemory(MemoryTopology):
    """Workers of one host train one model in memory that they share, without locks [Niu et al. 2011].

    Each worker's optimizer steps the model in place, without waiting. Concurrent updates may overwrite each other,
    which matters little if they seldom touch the same values. Nothing is sent.
    """

    exact: ClassVar[bool] = False
