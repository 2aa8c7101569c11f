"""The wire format: frames of a fixed head, the sizes of up to sixteen parts, and the parts.

    offset  bytes
    0       4      "weft"
    4       1      kind
    5       1      number of parts
    6       2      verb: the operation that a request names, defined by the server's handler
    8       8      number of the request; a reply has the number of its request
    16      8      settled: the client has all replies to ONCE requests up to this number and never sends them again
    24      8 each sizes of the parts

Numbers are unsigned and big-endian. Nothing else is interpreted: no pickle, no code, no names.
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
    """The kind of a frame."""

    ONCE = 1
    """A request that is never served twice, however often it is sent."""
    QUERY = 2
    """An idempotent request, served again where its reply was lost."""
    REPLY = 3
    REFUSAL = 4
    """A reply with one sentence: the reason why the request was refused."""
    BEAT = 5
    """A heartbeat of an idle link."""
    BYE = 6
    """The sender closes the link on purpose."""


REQUESTS = (Kind.ONCE, Kind.QUERY)


class FrameError(ConnectionError):
    """Bytes that are not a frame, a frame above the size limit, or one that the protocol does not allow."""


@dataclass(frozen=True)
class Head:
    """A frame without its parts."""

    kind: Kind
    verb: int = 0
    number: int = 0
    settled: int = 0

    def pack(self, sizes: Sequence[int]) -> bytes:
        """The bytes before the parts."""
        head = _HEAD.pack(_MAGIC, self.kind, len(sizes), self.verb, self.number, self.settled)
        return head + struct.pack(f"!{len(sizes)}Q", *sizes)


def unpack(raw: bytes | bytearray) -> tuple[Head, int]:
    """A head and the number of its parts. Raises FrameError."""
    magic, kind, parts, verb, number, settled = _HEAD.unpack(raw)
    if magic != _MAGIC or parts > MOST_PARTS:
        raise FrameError("the peer sent bytes that are not a frame")
    try:
        return Head(Kind(kind), verb, number, settled), parts
    except ValueError:
        raise FrameError(f"the peer sent a frame of the unknown kind {kind}") from None


def unpack_sizes(raw: bytes | bytearray, most: int) -> tuple[int, ...]:
    """The sizes of the parts. Raises FrameError where they sum to more than `most`."""
    sizes: tuple[int, ...] = struct.unpack(f"!{len(raw) // 8}Q", raw)
    if sum(sizes) > most:
        raise FrameError(f"a frame of {sum(sizes)} bytes exceeds the limit of {most}")
    return sizes
