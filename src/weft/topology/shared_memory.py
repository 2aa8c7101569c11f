from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from weft.topology import MemoryTopology


@final
@dataclass(frozen=True, kw_only=True)
class SharedMemory(MemoryTopology):
    """Workers of one host train one model in memory that they share, without locks [Niu et al. 2011].

    Each worker's optimizer steps the model where it lies, whatever the others do meanwhile: some of what they write is
    overwritten, which matters little where they seldom touch the same values. Nothing is sent.
    """

    exact: ClassVar[bool] = False
