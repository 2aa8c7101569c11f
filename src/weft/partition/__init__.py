"""WHERE does the model live?"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

from weft.axis import Answer


@dataclass(frozen=True, kw_only=True)
class Partition(Answer, ABC):
    """How the model is laid over the workers."""

    axis: ClassVar[str] = "partition"
