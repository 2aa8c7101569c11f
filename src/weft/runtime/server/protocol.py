"""The requests of workers to parameter servers, and their encoding.

    JOIN    worker; replies its step, whether       the worker takes part from now on and replaces any process that
            there is a model, next telling          had its place
    SET     bundle; values, optimizer's state       the initial state, from worker 0
    BEGIN   worker, step, share; hyperparameters,   announces the gradients of a step, which use these values
            buffers
    PUSH    worker, bundle, step, version;          the gradients of one bundle and step, compressed, computed with
            payloads                                this version of it
    PULL    worker, bundle, steps, urgency;         answered once this many of the worker's steps are applied and it
            replies version, slowest, values        may start its next
    WATCH   worker, bundle, clock, urgency;         answered once the slowest worker's clock is beyond this one; the
            replies version, slowest, values        first bundle includes the buffers
    FETCH   bundle; replies optimizer's state       for a checkpoint
    TELL    worker, number; values                  answered with the values of all workers, once all have sent theirs
    LEAVE   worker                                  the worker needs nothing more and is no longer waited for

A bundle is a set of ranges that travel together (`topology/_shards`); `BUFFERS` stands for the model's buffers, which
are worker 0's. Clocks in replies count the worker's own steps since it joined. Any other request is refused unless it
comes from the process that joined last as this worker.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.store.plain import plain, value
from weft.transport.tensor_bytes import raw


class Verb(enum.IntEnum):
    """The kinds of requests."""

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
"""The urgency of small messages that are waited for."""

Hyper = list[dict[str, Any]]
"""An optimizer's options by group, as JSON values, with lists for tuples."""


@dataclass(frozen=True)
class Announcement:
    """A worker's announcement of the gradients of a step (`BEGIN`)."""

    worker: int
    step: int
    share: float
    leaving: bool
    """Whether the worker was told to terminate."""
    hyper: Hyper
    buffers: Sequence[memoryview]

    @classmethod
    def unpack(cls, parts: Sequence[memoryview]) -> Announcement:
        """Decode the parts of a request; the result does not refer to their memory."""
        worker, step, share, leaving = BEGIN.unpack(parts[0])
        buffers = [memoryview(bytes(part)) for part in parts[2:]]
        return cls(worker, step, share, leaving, json.loads(bytes(parts[1])), buffers)


def packed(state: Any) -> list[memoryview]:
    """A value with its tensors, as two parts of a frame: its tree, and the bytes of the tensors."""
    tensors: dict[str, Tensor] = {}
    tree = plain(state, "state", tensors)
    kinds = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    blob = b"".join(bytes(raw(tensor.cpu().contiguous())) for tensor in tensors.values())
    return [memoryview(json.dumps({"tree": tree, "tensors": kinds}).encode()), memoryview(blob)]


def unpacked(parts: Sequence[memoryview]) -> Any:
    """The value of two parts made by `packed`. Raises ValueError or a subclass if they are malformed."""
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
