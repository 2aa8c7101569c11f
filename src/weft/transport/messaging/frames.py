"""What goes over a link: frames of a fixed head, the sizes of up to sixteen parts, and the parts.

    offset  bytes
    0       4      "weft"
    4       1      kind
    5       1      how many parts
    6       2      verb: what a request asks for, which is the business of who serves
    8       8      number of the request; a reply has its request's
    16      8      settled: up to here the asker has all replies to what counts, and will never ask again
    24      8 each sizes of the parts

Numbers are unsigned, the highest byte first. Nothing is ever interpreted but this: no pickle, no code, no names.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_HEAD = struct.Struct("!4sBBHQQ")
HEAD_BYTES = _HEAD.size
MOST_PARTS = 16
_MAGIC = b"weft"


class Kind(enum.IntEnum):
    """What a frame is."""

    ONCE = 1
    """A request that counts: it is never served twice, however often it is sent."""
    QUERY = 2
    """A request that may be served again where its reply was lost."""
    REPLY = 3
    REFUSAL = 4
    """A reply that is one sentence saying why not."""
    BEAT = 5
    """Still here."""
    BYE = 6
    """Nothing more will come, on purpose."""


REQUESTS = (Kind.ONCE, Kind.QUERY)


class FrameError(ConnectionError):
    """Bytes that are no frame, or one that is larger than was agreed."""


@dataclass(frozen=True)
class Head:
    """A frame without its parts."""

    kind: Kind
    verb: int = 0
    number: int = 0
    settled: int = 0

    def pack(self, sizes: Sequence[int]) -> bytes:
        """The bytes that go before the parts."""
        head = _HEAD.pack(_MAGIC, self.kind, len(sizes), self.verb, self.number, self.settled)
        return head + struct.pack(f"!{len(sizes)}Q", *sizes)


def unpack(raw: bytes | bytearray) -> tuple[Head, int]:
    """A head and the number of its parts."""
    magic, kind, parts, verb, number, settled = _HEAD.unpack(raw)
    if magic != _MAGIC or parts > MOST_PARTS:
        raise FrameError("what came is no frame")
    try:
        return Head(Kind(kind), verb, number, settled), parts
    except ValueError:
        raise FrameError(f"what came is no frame: kind {kind}") from None


def unpack_sizes(raw: bytes | bytearray, most: int) -> tuple[int, ...]:
    """The parts' sizes, which come to `most` at most."""
    sizes: tuple[int, ...] = struct.unpack(f"!{len(raw) // 8}Q", raw)
    if sum(sizes) > most:
        raise FrameError(f"a frame of {sum(sizes)} bytes is larger than the {most} that were agreed")
    return sizes
