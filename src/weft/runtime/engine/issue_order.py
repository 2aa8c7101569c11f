"""Decides which slot may be issued next, from the timetable, ready buckets, rounds in progress and the credit.

Pure bookkeeping without threads, tensors or clocks: the engine uses it in real time, tests in virtual time.
"""

from __future__ import annotations

from weft.schedule import Slot, Timetable


class IssueOrder:
    """The slots of one step, in order. `opened` for each bucket, `next` and `done` for each slot, until `over`."""

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
        """Backward has finished the gradients of this bucket."""
        self._open[bucket] = True

    def next(self) -> Slot | None:
        """The next slot in order, which counts as in progress from now on; None if it may not be issued yet."""
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
        """Whether every slot has been issued."""
        return self._next == len(self.timetable.slots)

    def done(self, slot: Slot) -> bool:
        """A slot is complete. Returns whether all parts of its round are complete."""
        self._under_way -= 1
        self._bytes -= slot.nbytes
        self._parts[slot.bucket] += 1
        if self._parts[slot.bucket] < slot.parts:
            return False
        self._parts[slot.bucket] = 0
        self._round[slot.bucket] += 1
        return True

    def over(self, bucket: int) -> bool:
        """Whether all rounds of a bucket are complete."""
        return self._round[bucket] > self._last[bucket]
