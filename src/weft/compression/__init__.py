"""WHAT goes on the wire?"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from weft.axis import Answer
from weft.lazy import torch
from weft.ops import Flow, Round, Spec

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, dict[str, "Tensor"]]
"""State that a compressor keeps between steps: by parameter, then by a key of its own; never by bucket."""


@dataclass(frozen=True)
class Piece:
    """One parameter in a bucket. The exchange reads `grad` and writes `mean`; both may be the same memory."""

    spec: Spec
    grad: Tensor
    mean: Tensor
    residual: Tensor | None = None
    """Where error feedback is on: the exchange writes the unsent part here. May be the memory of `grad`."""
    residual_pending: bool = False
    """Whether `residual` holds the unsent part of earlier steps, to be sent together with `grad`."""
    fresh: Tensor | None = None
    """The gradient of this step alone, where `grad` already includes the residual."""
    value: Tensor | None = None
    """The parameter itself, in the order of `grad`; None if it is not contiguous."""
    factors: tuple[Tensor, Tensor] | None = None
    """(G, X) where `grad` should equal G'X, as for a linear layer; only for compressors with `factors`."""

    def due(self) -> Piece:
        """This piece with the residual added to `grad`, in the memory of `residual`."""
        if self.residual is None or not self.residual_pending:
            return self
        return replace(self, grad=self.residual.add_(self.grad), residual_pending=False, fresh=self.grad)

    def real(self) -> Piece:
        """The same memory with complex values viewed as pairs of real ones; compressors handle real numbers only."""
        if not self.spec.dtype.is_complex:
            return self
        assert self.residual is None, "pieces are made real before residuals are attached"
        spec = self.spec.real()
        value = self.value.view(spec.dtype) if self.value is not None else None
        return Piece(spec, self.grad.view(spec.dtype), self.mean.view(spec.dtype), value=value)


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged together: flat tensors of one dtype on one device."""

    pieces: tuple[Piece, ...]
    flat: Tensor | None = None
    """All of the pieces' `grad` as one tensor, if they are adjacent in memory and each is its own `mean`."""

    def real(self) -> Bucket:
        """The same bucket viewed as real numbers, which is all that compressors handle."""
        if not self.pieces[0].spec.dtype.is_complex:
            return self
        pieces = tuple(piece.real() for piece in self.pieces)
        return Bucket(pieces, self.flat.view(pieces[0].spec.dtype) if self.flat is not None else None)


@dataclass(frozen=True, kw_only=True)
class Context:
    """The step and the logical rank of an exchange. Together with the run's seed they determine every random draw."""

    step: int
    rank: int
    workers: int
    seed: int = 0
    momentum: float = 0.0
    """The optimizer's momentum, if the compressor claims it."""
    scratch_memory: dict[Any, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """Scratch memory, reused from step to step; its content is not meaningful."""

    def key(self, name: str, *, shared: bool = False) -> int:
        """A 32-bit key for random draws. It depends only on (seed, step, rank, name), so a restart draws the same.

        `shared=True`: the same key on every rank.
        """
        text = f"{self.seed}/{self.step}/{'all' if shared else self.rank}/{name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")

    def generator(self, name: str, *, shared: bool = False) -> torch.Generator:
        """A PyTorch generator seeded with that key."""
        return torch.Generator().manual_seed(self.key(name, shared=shared))

    def scratch(self, what: str, piece: Piece, count: int, dtype: torch.dtype | None = None) -> Tensor:
        """Scratch memory for a parameter, reused from step to step; zero at first. Bytes, unless a dtype is given."""
        dtype = dtype or torch.uint8
        place = (self.rank, what, piece.spec.name, count, dtype)
        if place not in self.scratch_memory:
            self.scratch_memory[place] = torch.zeros(count, dtype=dtype, device=piece.grad.device)
        return self.scratch_memory[place]


@dataclass(frozen=True, kw_only=True)
class Compressor(Answer, ABC):
    """Turns the gradients of a bucket into payloads, and payloads into their mean.

    Gradients are real: callers pass `bucket.real()` and `spec.real()`.
    """

    axis: ClassVar[str] = "compression"
    lossless: ClassVar[bool] = False
    """Whether payloads decode to the same bits, so that the mean is exact and nothing is ever left out."""
    raw: ClassVar[bool] = False
    """Whether the payload is the gradient itself, so that a sum of payloads is the sum, and needs no `exchange`."""
    tracks_residual: ClassVar[bool] = False
    """Whether it needs the inner compressor to report the unsent part."""
    has_residual: ClassVar[bool] = False
    """Whether it keeps the unsent part in its state, as `residual`."""
    fuses_residual: ClassVar[bool] = False
    """Whether it accepts pieces with a pending residual, and adds gradient and residual itself."""
    factors: ClassVar[bool] = False
    """Whether it needs the factors that gradients are products of."""
    claims: ClassVar[tuple[str, ...]] = ()
    """Options that it takes over from the optimizer."""

    @property
    def approximates(self) -> bool:
        """Whether the sent value approximates the gradient, so that the difference can be kept as a residual."""
        return True

    @property
    def unbiased(self) -> bool:
        """Whether the sent value equals the gradient in expectation over its random draws."""
        return self.lossless

    def error(self, x: Tensor, spec: Spec) -> float:
        """An upper bound of the L2 norm of the unsent part, x - sent."""
        return float(x.double().norm())

    @abstractmethod
    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        """Yield Sum, All or Scatter until the `mean` of every piece (and `residual`, if not None) is written."""

    @abstractmethod
    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        """The same collectives as sizes, for a bucket of these parameters and this number of workers."""
