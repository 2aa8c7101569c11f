"""Contenders: the ways of distributing that a comparison runs, and the task that each of them runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.axis import DEFAULTS
from weft.lab import peers
from weft.lab.instruments.straggler import Slow
from weft.ops import Spec
from weft.profile import Profile
from weft.strategy import Strategy

WARMUP = 5
"""Steps that no figure counts, at least."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way of distributing, ours (a strategy) or somebody else's (a peer)."""

    name: str
    strategy: Strategy | None = None
    peer: str | None = None

    @property
    def sentence(self) -> str:
        if self.peer is not None:
            return peers.find(self.peer).sentence
        assert self.strategy is not None
        silent = {axis: DEFAULTS[axis] for axis in ("partition", "optimization")}
        return " ".join(answer.summary for axis, answer in self.strategy.answers() if silent.get(axis) != str(answer))

    @property
    def period(self) -> int:
        """Steps after which its pattern repeats; step times are averaged over so many."""
        if self.peer is not None:
            return peers.find(self.peer).period
        return self.strategy.optimization.period if self.strategy is not None else 1

    @property
    def in_step(self) -> bool:
        """Whether all workers take each step together."""
        return self.strategy is None or self.strategy.synchrony.lockstep

    @property
    def merges_models(self) -> bool:
        """Whether every worker has an optimizer of its own, and models are merged."""
        return self.strategy is not None and self.strategy.merges_models

    def server_hosts(self, workers: int) -> tuple[int, ...]:
        """Where its servers sit, if it has any."""
        return self.strategy.server_hosts(workers) if self.strategy is not None else ()

    def declared_bytes(self, specs: Sequence[Spec], workers: int) -> float:
        """What one worker must send in a step, on average."""
        if workers == 1:
            return 0.0
        if self.peer is not None:
            return peers.find(self.peer).bytes(specs, workers)
        assert self.strategy is not None
        return self.strategy.wire_bytes(specs, workers) * self.strategy.optimization.pushes

    def link_bytes(self, specs: Sequence[Spec], workers: int) -> float:
        """What the busiest link must carry in a step, on average, one way, where servers send models back; else 0."""
        if self.strategy is None or not self.strategy.has_servers:
            return 0.0
        often, model = self.strategy.optimization, sum(spec.nbytes for spec in specs)
        pushed = self.strategy.push_bytes(specs) * often.pushes
        return self.strategy.server_topology.link_bytes(pushed, model * often.fetches, workers)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every contender runs."""

    job: str
    args: tuple[str, ...] = ()
    steps: int = 30
    slow: Mapping[int, Slow] = field(default_factory=dict)
    profile: Profile | None = None
    """Sleep through computing by this profile; None: compute for real."""
    target_loss: float | None = None
    target_held_out: float | None = None

    def warmup(self, period: int = 1) -> int:
        """Steps that no figure counts: at least five, and such that whole periods follow."""
        whole = (self.steps - WARMUP) // period
        return self.steps - whole * period if whole > 0 else min(WARMUP, self.steps - 1)
