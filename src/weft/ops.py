"""Intents: what an answer may ask for. Answers yield them, interpreters (`transport/`) perform them.

A *flow* is a generator: it yields an intent, receives the result, and returns its value. The same flow runs on
loopback (what it means), in virtual time (what it costs) and for real.

    to everyone     Sum, All, Scatter        a compressor says these; a topology lowers them to messages
    to one          Send, Recv               messages in order, per pair of peers
    a request       Push, Pull, Swap         answered by an actor that serves: a server, or a gossip partner
    several         Issue, Await             requests that overlap: issued one after another, awaited later
    serving         Serve, Reply             the other side of a request

A payload is a tuple of tensors. `Sum` adds what everyone gave: gradients are weighted by each worker's share
*before* they are exchanged, so a sum of shares is the mean and uneven batches need nothing else.

Memory: a payload that was handed out is not touched again, what is received is read-only, and a `Sum`'s result belongs
to the flow. An interpreter may put it into the very tensor that the `Sum` carries.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from weft.errors import UserError
from weft.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Payload = tuple["Tensor", ...]


@dataclass(frozen=True)
class Op:
    """Any intent."""


@dataclass(frozen=True)
class Collective(Op):
    """An intent that every worker states at the same point of its flow."""


@dataclass(frozen=True)
class Sum(Collective):
    """Everyone's tensor, added. Result: a tensor of the same shape, the same bits everywhere."""

    payload: Tensor


@dataclass(frozen=True)
class All(Collective):
    """Everyone's payload, unopened. Result: the payloads in the order of the logical ranks. Sizes are equal."""

    payload: Payload


@dataclass(frozen=True)
class Scatter(Collective):
    """One payload for each worker (all-to-all). Result: the payloads of all workers for this one, by rank."""

    parts: Sequence[Payload]


@dataclass(frozen=True)
class Send(Op):
    """Send a payload to `to` without waiting. Result: None."""

    to: int
    payload: Payload


@dataclass(frozen=True)
class Recv(Op):
    """Wait for the next payload from `source`, shaped as `like`. Result: the payload."""

    source: int
    like: Payload


@dataclass(frozen=True)
class Ask(Op):
    """A request to `to`, which serves. Result: the payload of its reply."""

    to: int
    payload: Payload = ()


@dataclass(frozen=True)
class Push(Ask):
    """Send a contribution; the reply confirms its arrival."""


@dataclass(frozen=True)
class Pull(Ask):
    """Fetch the other side's values."""


@dataclass(frozen=True)
class Swap(Ask):
    """Exchange values with the other side, atomically there."""


@dataclass(frozen=True)
class Issue(Op):
    """Send a request without waiting. Result: None; `Await` takes the reply."""

    request: Ask


@dataclass(frozen=True)
class Await(Op):
    """Wait for the reply to the oldest issued request to `to`. Result: the payload of the reply."""

    to: int


@dataclass(frozen=True)
class Serve(Op):
    """Wait for the next request to me. Result: `(sender, request)`, or None when no actor is left to send one."""


@dataclass(frozen=True)
class Reply(Op):
    """Answer the oldest request of `to` that has no reply yet. Result: None."""

    to: int
    payload: Payload = ()


T = TypeVar("T")
Flow = Generator[Op, Any, T]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The number of workers, and the cost of a message between two of them (a + n/b)."""

    workers: int
    latency_s: float = 0.0
    bytes_per_s: float = float("inf")


@dataclass(frozen=True)
class Round:
    """One collective as sizes: the intent, and the bytes of one worker's payload."""

    op: type[Collective]
    nbytes: int
    bound: int | None = None
    """The maximum, if the size depends on values; `nbytes` is then the expected size."""


SMALL_BYTES = 64 * 2**10
"""Smaller payloads share a message."""


def nbytes(payload: Payload) -> int:
    """Bytes that a payload takes on the wire."""
    return sum(part.numel() * part.element_size() for part in payload)


def nameable(specs: Sequence[Spec], most: int) -> None:
    """Refuse parameters whose places a payload has no room to name."""
    for spec in specs:
        if spec.numel > most:
            raise UserError(
                f"{spec.name} has {spec.numel} values, and a payload names the places of {most} at most; "
                "divide the parameter, or use a compressor that sends no places, such as int8"
            )


@dataclass(frozen=True)
class Spec:
    """A parameter's gradient without its values: what schedules group and compressors size."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = field(default_factory=lambda: torch.float32)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def real(self) -> Spec:
        """A complex parameter as pairs of real numbers along its last dimension; any other as it is."""
        if not self.dtype.is_complex:
            return self
        *outer, last = self.shape or (1,)
        return Spec(self.name, (*outer, 2 * last), self.dtype.to_real())
