"""Non-finite checks on a GPU, read back one step late so that the host never waits for the device.

The GPU records the largest absolute value of each worker's gradients, and replaces non-finite means by zeros just
before they are used. The records are read in the next step, which is then not taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Means = tuple[Sequence[int], Tensor | None]
"""The indices of parameters, and the memory of their means, if it is contiguous."""


@dataclass
class DeferredFiniteCheck:
    """The records of one step; parameters are identified by their index in the model."""

    step: int = 0
    given: list[tuple[int, Sequence[int], Sequence[Tensor]]] = field(default_factory=list)
    """A worker's rank, its parameters, and the largest absolute value of each gradient."""
    zeroed: list[tuple[Sequence[Sequence[int]], Tensor, torch.cuda.Event]] = field(default_factory=list)
    """Parameters by bucket, whether their means were replaced by zeros, and an event after which that can be read."""

    def note(self, rank: int, members: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Record a worker's gradients, before they are exchanged."""
        full = [(index, grad) for index, grad in zip(members, grads, strict=True) if grad.numel()]
        self.given.append((rank, [index for index, _ in full], _largest([grad for _, grad in full])))

    def shield(self, means: Sequence[Means]) -> None:
        """Replace non-finite means by zeros, just before they are used."""
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
        """The first parameter in a bucket with a non-finite mean; and the local worker and parameter that caused it.
        Waits for a GPU that is a step behind."""
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
    """The largest absolute value of each tensor, which is finite if and only if all values are."""
    return list(torch._foreach_norm(tensors, torch.inf)) if tensors else []
