"""Values that all workers exchange through a server, outside of the rounds (`TELL`)."""

from __future__ import annotations

import json
from collections.abc import Set as AbstractSet
from typing import Any

from weft.transport.messaging import Request


class Gathers:
    """Gathers of values by rank: each is answered once every awaited rank has sent its values."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.next = 0
        """The number of the next gather to be answered."""
        self._open: dict[int, dict[int, tuple[Request, Any]]] = {}

    def add(self, number: int, rank: int, request: Request, values: Any) -> None:
        """One rank's contribution to a gather."""
        self._open.setdefault(number, {})[rank] = request, values

    def answer(self, awaited: AbstractSet[int]) -> None:
        """Send all values to all ranks of every complete gather; None stands for a rank that has sent nothing."""
        for number in [number for number, sent in self._open.items() if awaited <= set(sent)]:
            sent = self._open.pop(number)
            self.next = max(self.next, number + 1)
            rows = json.dumps([sent[rank][1] if rank in sent else None for rank in range(self.ranks)])
            for request, _ in sent.values():
                request.reply([memoryview(rows.encode())])
