"""The shard of a server: its bundles, and the model's buffers."""

from __future__ import annotations

from collections.abc import Sequence

from weft.rounds import Rounds
from weft.runtime.server import protocol
from weft.runtime.server.buffers import ServerBuffers
from weft.runtime.server.bundle_rounds import BundleRounds
from weft.runtime.server.bundle_state import BundleState
from weft.runtime.server.pending_pulls import PendingPulls
from weft.runtime.server.statistics import Statistics
from weft.synchrony import Synchrony


class Shard:
    """The rounds of all bundles of a server; no pull is answered before every bundle has its initial values.

    `buffers` is the number of bytes of the model's buffers on this server.
    """

    def __init__(
        self, kept: Sequence[BundleState], synchrony: Synchrony, workers: int, buffers: int, statistics: Statistics
    ) -> None:
        self.buffers = ServerBuffers(buffers)
        self.bundles = [
            BundleRounds(
                each,
                Rounds(synchrony, each.parts, workers, each.step, updated=statistics.updated),
                statistics,
                self.buffers,
                carries_buffers=number == 0,
            )
            for number, each in enumerate(kept)
        ]
        self._set: set[int] = set()
        """Bundles that have their initial values."""

    @property
    def started(self) -> bool:
        """Whether the model has its initial values."""
        return len(self._set) == len(self.bundles)

    def bundle(self, number: int) -> BundleRounds:
        """Raises ValueError if there is no such bundle."""
        if not 0 <= number < len(self.bundles):
            raise ValueError(f"there is no bundle {number}")
        return self.bundles[number]

    def pulls(self, number: int) -> tuple[PendingPulls, BundleRounds]:
        """The pending pulls of a bundle or of the buffers, and the bundle with which they are answered."""
        if number == protocol.BUFFERS:
            return self.buffers.pulls, self.bundles[0]
        bundle = self.bundle(number)
        return bundle.pulls, bundle

    def set(self, number: int, parts: Sequence[memoryview]) -> None:
        """Set the initial values of a bundle, or of the buffers. Raises ValueError if the model has its values."""
        if self.started:
            raise ValueError("the model is already set")
        if number == protocol.BUFFERS:
            self.buffers.set(parts)
        else:
            self.bundle(number).kept.set(*protocol.unpacked(parts))
            self._set.add(number)

    def join(self, worker: int) -> None:
        """Add a worker to all rounds, and drop its pending requests."""
        for bundle in self.bundles:
            bundle.join(worker)

    def rejoin(self, worker: int) -> None:
        """Add a worker to all rounds again, whose link had been lost."""
        for bundle in self.bundles:
            bundle.rounds.join(worker)

    def leave(self, worker: int) -> None:
        """Remove a worker from all rounds."""
        for bundle in self.bundles:
            bundle.rounds.leave(worker)
        self.answer_all(worker)

    def refuse(self, worker: int, why: str) -> None:
        """Refuse all pending requests of a worker."""
        self.buffers.pulls.refuse(worker, why)
        for bundle in self.bundles:
            bundle.refuse(worker, why)

    def answer_all(self, by: int = 0) -> None:
        """Reply to the pulls of all bundles that may be answered."""
        for bundle in self.bundles:
            self.answer(bundle, by)

    def answer(self, bundle: BundleRounds, by: int) -> None:
        """Reply to the pulls of a bundle that may be answered."""
        if self.started:
            bundle.answer(by)
