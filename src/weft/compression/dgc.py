from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

from weft.compression import Bucket, Compressor, Context, State
from weft.compression.topk import Topk
from weft.lazy import torch
from weft.ops import All, Flow, Round, Spec

_FIRST = 0.25


@final
@dataclass(frozen=True, kw_only=True)
class Dgc(Compressor):
    """Deep gradient compression: sends the largest values of locally accumulated momentum [Lin et al. 2018].

    u = m u + g, v = v + u; the k largest values of v are sent, and v and u are set to 0 there. m is the momentum of the
    loop's SGD, which then runs without momentum; weight decay has no momentum either. The first `warmup` steps send
    more: 1/4 of all values, then 1/16, and so on down to `ratio`.
    """

    claims: ClassVar[tuple[str, ...]] = ("momentum",)
    has_residual: ClassVar[bool] = True

    ratio: float = 0.001
    """The fraction of each parameter's values that is sent."""
    clip: float = math.inf
    """Maximum norm of a parameter's gradient, as a mean over workers, before it is accumulated."""
    warmup: int = 0
    """Steps until `ratio` is reached; four epochs in the paper."""
    sampled: bool = False
    """Estimate the threshold from a sample."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is {self.ratio}, but must lie in (0, 1]")
        if not self.clip > 0:
            raise ValueError(f"clip is {self.clip}, but must be positive")
        if self.warmup < 0:
            raise ValueError(f"warmup is {self.warmup}, but must not be negative")

    @property
    def approximates(self) -> bool:
        return False

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[State]:
        pieces = []
        for piece in bucket.pieces:
            memory = state.setdefault(piece.spec.name, {})
            for key in ("velocity", "residual"):
                if key not in memory:
                    memory[key] = torch.zeros_like(piece.grad)
            grad = piece.grad
            if math.isfinite(self.clip):
                most = self.clip * ctx.workers**-1.5  # a worker's part of the norm, if gradients add up like noise
                grad = grad * (most / grad.norm().clamp(min=most))
            memory["velocity"].mul_(ctx.momentum).add_(grad)
            due = memory["residual"].add_(memory["velocity"])
            pieces.append(replace(piece, grad=due, residual=due))
        top = Topk(ratio=self._ratio(ctx.step), sampled=self.sampled)
        inner = top.exchange(Bucket(tuple(pieces)), state, ctx)
        gather = next(inner)
        assert isinstance(gather, All), "top-k gathers values and indices"
        chosen = gather.payload[1].split([top.k(piece.spec.numel) for piece in pieces])
        for piece, places in zip(pieces, chosen, strict=True):
            state[piece.spec.name]["velocity"].index_fill_(0, places.long(), 0.0)
        payloads = yield gather
        try:
            inner.send(payloads)
        except StopIteration:
            return state
        raise AssertionError("top-k has one round")

    def rounds(self, specs: Sequence[Spec], workers: int) -> tuple[Round, ...]:
        (last,) = Topk(ratio=self.ratio).rounds(specs, workers)
        (first,) = Topk(ratio=self._ratio(0)).rounds(specs, workers)
        return (Round(All, last.nbytes, bound=first.nbytes) if self.warmup else last,)

    def _ratio(self, step: int) -> float:
        if step >= self.warmup:
            return self.ratio
        stages = max(1, math.ceil(math.log(self.ratio) / math.log(_FIRST)))
        return max(self.ratio, _FIRST ** (1 + stages * step // self.warmup))
