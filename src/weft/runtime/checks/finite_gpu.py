"""What a GPU finds in the gradients of one step, without being asked: an answer now would hold it up.

It notes how large each worker's gradients are, and just before means are used it puts zeros in place of those that are
not finite. The notes are read with the next step, when they are there, and nobody takes that step then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Means = tuple[Sequence[int], Tensor | None]
"""Parameters by their numbers, and the memory in which their means lie together, if any."""


@dataclass
class DeferredFiniteCheck:
    """The notes of one step; parameters are known by their number in the model."""

    step: int = 0
    given: list[tuple[int, Sequence[int], Sequence[Tensor]]] = field(default_factory=list)
    """A worker's rank, parameters, and the largest absolute value in each one's gradient."""
    zeroed: list[tuple[Sequence[Sequence[int]], Tensor, torch.cuda.Event]] = field(default_factory=list)
    """Parameters by bucket, whether zeros had to be put there, and when that can be read."""

    def note(self, rank: int, members: Sequence[int], grads: Sequence[Tensor]) -> None:
        """A worker's gradients, before they are exchanged."""
        full = [(index, grad) for index, grad in zip(members, grads, strict=True) if grad.numel()]
        self.given.append((rank, [index for index, _ in full], _largest([grad for _, grad in full])))

    def shield(self, means: Sequence[Means]) -> None:
        """Means are about to be used: those that are not finite become zeros."""
        there = [(members, flat) for members, flat in means if flat is not None and flat.numel()]
        if not there:
            return
        bad = torch.isfinite(torch.stack(_largest([flat for _, flat in there]))).logical_not_()
        for (_, flat), each in zip(there, bad.unbind(), strict=True):
            flat.masked_fill_(each, 0.0)
        words = torch.empty(bad.shape, dtype=torch.bool, pin_memory=True).copy_(bad, non_blocking=True)
        event = torch.cuda.current_stream(bad.device).record_event()
        self.zeroed.append(([members for members, _ in there], words, event))

    def read(self) -> tuple[int | None, tuple[int, int] | None]:
        """The first parameter, or one it shares a bucket with, whose mean was not finite; and the worker here and the
        parameter that are to blame. Waits for a GPU that is a step behind."""
        zeroed = None
        for groups, words, event in self.zeroed:
            event.synchronize()
            bad = (members[0] for members, each in zip(groups, words.tolist(), strict=True) if each)
            zeroed = next(bad, None) if zeroed is None else zeroed
        if zeroed is None:
            return None, None
        for rank, members, largest in self.given:
            for index, each in zip(members, largest, strict=True):
                if not torch.isfinite(each):
                    return zeroed, (rank, index)
        return zeroed, None


def _largest(tensors: list[Tensor]) -> list[Tensor]:
    """For each the largest absolute value, which is finite where all values are."""
    return list(torch._foreach_norm(tensors, torch.inf)) if tensors else []
