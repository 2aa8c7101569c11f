"""The samples that the logical workers of a process have used since their last merge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Share = float | Callable[[], float]
"""A worker's share of a step's joined batch, or its samples; or a function that gathers it from all workers."""


@dataclass
class _Count:
    mine: float = 0.0
    joined: float = 0.0
    """The samples of all workers in the same steps."""
    share: float | None = None
    """The share of every batch, if it was always the same."""
    same: bool = True
    pending: list[tuple[Share, Share]] = field(default_factory=list)
    """Batches whose shares are gathered later, all at once."""

    def settle(self) -> None:
        for share, joined in self.pending:
            known = share() if callable(share) else share
            total = joined() if callable(joined) else joined
            self.same = self.same and self.share in (None, known)
            self.share, self.mine, self.joined = known, self.mine + known * total, self.joined + total
        self.pending = []


class SampleCounts:
    """Each logical worker's share of the samples of all workers, for each fragment since its last merge."""

    def __init__(self, passes: int, fragments: int, workers: int) -> None:
        self._passes, self._workers = passes, workers
        self._counts = [self._new() for _ in range(fragments)]

    def _new(self) -> list[_Count]:
        return [_Count() for _ in range(self._passes)]

    def deal(self, pass_index: int, share: Share, joined: Share) -> None:
        """A batch with this share of a step's joined batch, which has `joined` samples."""
        for counts in self._counts:
            counts[pass_index].pending.append((share, joined))
            if not (callable(share) or callable(joined)):
                counts[pass_index].settle()

    def reset(self, fragment: int) -> list[float]:
        """Each worker's share, exactly that of its batches where it never changed; then count anew."""
        counts, self._counts[fragment] = self._counts[fragment], self._new()
        for count in counts:
            count.settle()
        return [self._share(count) for count in counts]

    def _share(self, count: _Count) -> float:
        if count.share is None:
            return 1 / self._workers
        return count.share if count.same else count.mine / count.joined

    def state(self, pass_index: int) -> dict[str, Any]:
        """A worker's counts for a checkpoint, by fragment."""
        found = []
        for counts in self._counts:
            count = counts[pass_index]
            count.settle()
            found.append([count.mine, count.joined, -1.0 if count.share is None else count.share, float(count.same)])
        return {"workers": self._workers, "counts": found}

    def load(self, pass_index: int, state: Mapping[str, Any]) -> None:
        """Continue to count, unless there are more or fewer workers: shares of other batches would not add up to 1."""
        if state["workers"] != self._workers:
            return
        for counts, (mine, joined, share, same) in zip(self._counts, state["counts"], strict=True):
            counts[pass_index] = _Count(mine, joined, None if share < 0 else share, bool(same))
