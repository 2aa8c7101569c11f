"""A worker's view of a bundle that a server keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from weft.runtime.server.protocol import PULLED
from weft.topology._shards import Bundle
from weft.transport.tensor_bytes import raw


@dataclass
class BundleRoute:
    """The route of a bundle between this worker and the server that keeps it."""

    server: int
    number: int
    bundle: Bundle
    place: int
    """Its index among all bundles."""
    came: set[str] = field(default_factory=set)
    pull_pending: bool = False
    """Whether the request of the next `pull` has been sent already."""
    about: bytearray = field(default_factory=lambda: bytearray(PULLED.size))
    """The header of the values that this worker holds, as its server sent it."""
    there: float = 0.0
    """When its server had received the last push."""

    @property
    def version(self) -> int:
        return int(PULLED.unpack(self.about)[0])

    @property
    def slowest(self) -> int:
        """The clock of the slowest worker in that header."""
        return int(PULLED.unpack(self.about)[1])

    def memory(self, about: bytearray, into: Mapping[str, Tensor]) -> list[memoryview]:
        """Memory for a reply with this bundle's values: its header, and the ranges of flat tensors."""
        return [memoryview(about), *(raw(into[part.name][part.start : part.stop]) for part in self.bundle)]
