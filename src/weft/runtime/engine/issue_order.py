"""What may go on the wire now: a timetable, the gates that backward has opened, the rounds under way, and the credit.

Pure bookkeeping, without threads, tensors or clocks: the engine keeps it for real, a test in virtual time.
"""

from __future__ import annotations

from weft.schedule import Slot, Timetable


class IssueOrder:
    """One step's slots, in their order. `opened`, `next`, `done` for each slot, until `over`."""

    def __init__(self, timetable: Timetable) -> None:
        self.timetable = timetable
        self._next = 0
        self._open = [False] * len(timetable.buckets)
        self._round = [0] * len(timetable.buckets)
        self._parts = [0] * len(timetable.buckets)
        self._last = [0] * len(timetable.buckets)
        for slot in timetable.slots:
            self._last[slot.bucket] = max(self._last[slot.bucket], slot.round)
        self._under_way = 0
        self._bytes = 0

    def opened(self, bucket: int) -> None:
        """Backward has finished this bucket's gradients."""
        self._open[bucket] = True

    def next(self) -> Slot | None:
        """The next slot in order, and it counts as under way from now on; None: not yet."""
        if self.empty:
            return None
        slot = self.timetable.slots[self._next]
        full = self._under_way > 0 and self._bytes + slot.nbytes > self.timetable.credit
        if full or not self._open[slot.bucket] or self._round[slot.bucket] != slot.round:
            return None
        self._next += 1
        self._under_way += 1
        self._bytes += slot.nbytes
        return slot

    @property
    def empty(self) -> bool:
        """Whether every slot has been handed out."""
        return self._next == len(self.timetable.slots)

    def done(self, slot: Slot) -> bool:
        """A slot is through. Returns whether its round is, with all of its parts."""
        self._under_way -= 1
        self._bytes -= slot.nbytes
        self._parts[slot.bucket] += 1
        if self._parts[slot.bucket] < slot.parts:
            return False
        self._parts[slot.bucket] = 0
        self._round[slot.bucket] += 1
        return True

    def over(self, bucket: int) -> bool:
        """Whether all of a bucket's rounds are through."""
        return self._round[bucket] > self._last[bucket]
