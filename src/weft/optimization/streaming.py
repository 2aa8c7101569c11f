from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft.optimization import Merge, ModelMerging, State, at_least_one, fraction, positive
from weft.optimization._nesterov import outer_sgd

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Streaming(ModelMerging):
    """`outer` in fragments, which are merged in turn and beside computing: Streaming DiLoCo [Douillard et al. 2025].

    Fragments are runs of neighbouring layers of about equal size. Each is sent once in `every` steps, and its outer
    step is taken `delay` steps later: copy = mix * copy + (1 - mix) * anchor.
    """

    every: int = 40
    """Steps in which every fragment is merged once."""
    fragments: int = 4
    """The number of fragments."""
    delay: int = -1
    """Steps from sending a fragment to using the result; -1: every // fragments, at least 1."""
    mix: float = 0.0
    """The part of its copy that a worker keeps."""
    lr: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.9
    """Outer momentum."""
    nesterov: bool = True
    """Whether the outer momentum is Nesterov's."""

    def __post_init__(self) -> None:
        at_least_one(every=self.every, fragments=self.fragments)
        fraction(momentum=self.momentum, mix=self.mix)
        positive(lr=self.lr)
        if self.fragments > self.every:
            raise ValueError(
                f"{self.fragments} fragments do not fit into every={self.every} steps; use fewer fragments"
            )
        if not -1 <= self.delay <= self.every:
            raise ValueError(f"delay is {self.delay}, but must be at most every={self.every}; -1: every // fragments")

    @property
    def num_fragments(self) -> int:
        return self.fragments

    @property
    def outer_copies(self) -> int:
        return 1 if self.momentum else 0

    @property
    def period(self) -> int:
        return self.every

    def due(self, step: int) -> tuple[Merge, ...]:
        delay = max(1, self.every // self.fragments) if self.delay < 0 else self.delay
        sent = [(k + 1) * self.every // self.fragments % self.every for k in range(self.fragments)]
        at = (step + 1) % self.every
        return tuple(Merge(finish_step=step + delay, fragment=k) for k, turn in enumerate(sent) if turn == at)

    def merge(self, anchor: Tensor, difference: Tensor, state: State, workers: int) -> tuple[Tensor, State]:
        return outer_sgd(anchor, difference, state, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)

    def adopt(self, copy: Tensor, before: Tensor, after: Tensor, workers: int) -> Tensor:
        return after if not self.mix else copy * self.mix + after * (1 - self.mix)
