"""WHAT goes on the wire?"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from weft.axis import Answer
from weft.ops import Flow, Round, Spec

State = dict[str, dict[str, Tensor]]
"""What a compressor remembers, by parameter and then by its own key; never by bucket."""


@dataclass(frozen=True)
class Piece:
    """One parameter in a bucket. The exchange reads `grad` and writes `mean`, which may be the same memory."""

    spec: Spec
    grad: Tensor
    mean: Tensor
    residual: Tensor | None = None
    """Where somebody keeps account: the exchange leaves here what it did not send. May be `grad`'s memory."""
    residual_pending: bool = False
    """Whether `residual` holds what was not sent before, which is to be sent with `grad`."""
    fresh: Tensor | None = None
    """Where `grad` holds what was owed before too: the gradient of this step alone."""
    value: Tensor | None = None
    """The parameter itself, in the order of `grad`; None where it does not lie in one piece."""
    factors: tuple[Tensor, Tensor] | None = None
    """(G, X) where `grad` ought to be G'X, as a linear layer's is; only for who asks for it."""

    def due(self) -> Piece:
        """With all that is to be sent in `grad`, added up in the memory of `residual`."""
        if self.residual is None or not self.residual_pending:
            return self
        return replace(self, grad=self.residual.add_(self.grad), residual_pending=False, fresh=self.grad)

    def real(self) -> Piece:
        """The same memory, in which complex values are pairs of real ones: compressors know real numbers alone."""
        if not self.spec.dtype.is_complex:
            return self
        assert self.residual is None, "pieces are made real before anybody keeps account"
        spec = self.spec.real()
        value = self.value.view(spec.dtype) if self.value is not None else None
        return Piece(spec, self.grad.view(spec.dtype), self.mean.view(spec.dtype), value=value)


@dataclass(frozen=True)
class Bucket:
    """Gradients that leave together: flat tensors of one dtype on one device."""

    pieces: tuple[Piece, ...]
    flat: Tensor | None = None
    """All of the pieces' `grad` as one tensor, where they lie side by side and are their own `mean`."""

    def real(self) -> Bucket:
        """The same bucket for a compressor, which knows real numbers alone."""
        if not self.pieces[0].spec.dtype.is_complex:
            return self
        pieces = tuple(piece.real() for piece in self.pieces)
        return Bucket(pieces, self.flat.view(pieces[0].spec.dtype) if self.flat is not None else None)


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where an exchange stands: the step and the logical rank; with the run's seed they name every random draw."""

    step: int
    rank: int
    workers: int
    seed: int = 0
    momentum: float = 0.0
    """The optimizer's, where the compressor claims it."""
    scratch_memory: dict[Any, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """Memory that is used again in the next step; it holds nothing that matters."""

    def key(self, name: str, *, shared: bool = False) -> int:
        """A number of 32 bits for random draws; (seed, step, rank, name) decide it: the same after any restart.

        `shared=True`: the same on every rank.
        """
        text = f"{self.seed}/{self.step}/{'all' if shared else self.rank}/{name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")

    def generator(self, name: str, *, shared: bool = False) -> torch.Generator:
        """PyTorch's own random numbers, from that key."""
        return torch.Generator().manual_seed(self.key(name, shared=shared))

    def scratch(self, what: str, piece: Piece, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Memory beside a parameter, kept from step to step; zeros at first."""
        place = (self.rank, what, piece.spec.name, count, dtype)
        if place not in self.scratch_memory:
            self.scratch_memory[place] = torch.zeros(count, dtype=dtype, device=piece.grad.device)
        return self.scratch_memory[place]


@dataclass(frozen=True, kw_only=True)
class Compressor(Answer, ABC):
    """How a bucket's gradients become payloads and their mean comes back.

    Gradients are real: whoever calls hands over `bucket.real()` and `spec.real()`.
    """

    axis: ClassVar[str] = "compression"
    lossless: ClassVar[bool] = False
    """Whether payloads decode to the same bits, so that the mean is exact and nothing is ever left out."""
    raw: ClassVar[bool] = False
    """Whether the payload is the gradient itself, so that a sum of payloads is the sum, and needs no `exchange`."""
    tracks_residual: ClassVar[bool] = False
    """Whether it asks an inner compressor for what that did not send."""
    has_residual: ClassVar[bool] = False
    """Whether it remembers what it has not sent yet, as `residual`."""
    fuses_residual: ClassVar[bool] = False
    """Whether it takes pieces that are `behind`, and adds gradient and debt up by itself."""
    factors: ClassVar[bool] = False
    """Whether it asks for what gradients are products of."""
    claims: ClassVar[tuple[str, ...]] = ()
    """What it takes over from the optimizer."""

    @property
    def approximates(self) -> bool:
        """Whether what it sends is close to the gradient, so that the difference can be owed."""
        return True

    @property
    def unbiased(self) -> bool:
        """Whether what it sends is the gradient on average over its random draws."""
        return self.lossless

    def error(self, x: Tensor, spec: Spec) -> float:
        """The most that what is left out of a gradient can measure: the L2 norm of x - sent."""
        return float(x.double().norm())

    @abstractmethod
    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        """Yield Sum, All or Scatter until every piece's `mean` (and `residual`, where asked for) is written."""

    @abstractmethod
    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        """The same operations as sizes, for a bucket of these parameters among so many workers."""
