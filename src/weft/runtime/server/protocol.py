"""What workers ask of parameter servers, and how that is written.

    JOIN    worker; replies its step, whether       it takes part from here on, and whoever had its place does not
            there is a model, next telling
    SET     bundle; values, optimizer's state       what training starts from, by worker 0
    BEGIN   worker, step, share; hyper-parameters,  gradients of a step will come, to be used with these
            buffers
    PUSH    worker, bundle, step, version; what     one bundle's gradients of a step, computed with this version of it,
            it said                                 compressed: they count
    PULL    worker, bundle, steps, urgency;         answered once so many steps of the worker's count and it may start
            replies version, slowest, values        its next
    WATCH   worker, bundle, clock, urgency;         answered once the slowest worker's clock is beyond this one; with
            replies version, slowest, values        the first bundle come the buffers
    FETCH   bundle; replies optimizer's state       for a checkpoint
    TELL    worker, number; values                  answered with everyone's values, once all have told theirs
    LEAVE   worker                                  it has all it needs, and nobody waits for it any more

A bundle is what travels together (`topology/_shards`); `BUFFERS` stands for the model's buffers, which are worker 0's.
Clocks are told to a worker as it counts its own steps: since it joined. Whatever else is asked is refused unless it
comes over the links of the process that joined last as this worker.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.store.plain import plain, value
from weft.transport.tensor_bytes import raw


class Verb(enum.IntEnum):
    """What workers ask of servers."""

    JOIN = 1
    PUSH = 2
    BEGIN = 3
    PULL = 4
    LEAVE = 5
    SET = 6
    FETCH = 7
    TELL = 8
    WATCH = 9


WHO = struct.Struct("!I")
BUNDLE = struct.Struct("!I")
PUSH = struct.Struct("!IIQQ")
BEGIN = struct.Struct("!IQd?")
PULL = struct.Struct("!IIQi")
WATCH = struct.Struct("!IIqi")
PULLED = struct.Struct("!Qq?")
JOINED = struct.Struct("!Q?Q")
TELL = struct.Struct("!IQ")

BUFFERS = 2**32 - 1
AT_ONCE = -(2**31)
"""The urgency of what is small and waited for."""

Hyper = list[dict[str, Any]]
"""An optimizer's options, group by group: what JSON has, lists for tuples."""


def packed(state: Any) -> list[memoryview]:
    """A value with its tensors, as two parts of a frame: what it is, and the tensors' bytes."""
    tensors: dict[str, Tensor] = {}
    tree = plain(state, "state", tensors)
    kinds = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    blob = b"".join(bytes(raw(tensor.cpu().contiguous())) for tensor in tensors.values())
    return [memoryview(json.dumps({"tree": tree, "tensors": kinds}).encode()), memoryview(blob)]


def unpacked(parts: Sequence[memoryview]) -> Any:
    """The value of two parts that `packed` made. Raises ValueError and its kind where they are not."""
    about, blob = json.loads(bytes(parts[0])), parts[1]
    tensors: dict[str, Tensor] = {}
    at = 0
    for name, kind, shape in about["tensors"]:
        dtype = getattr(torch, kind)
        size = torch.Size(shape).numel() * dtype.itemsize
        piece = bytearray(blob[at : at + size])
        tensors[name] = torch.frombuffer(piece, dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
        at += size
    return value(about["tree"], tensors)
