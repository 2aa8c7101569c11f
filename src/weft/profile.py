"""What a step's computing costs, layer by layer: measured on a real model, or worked out from its layers.

Schedules group by it, sleeping compute stands in for it, the planner predicts from it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Seconds of one step on one worker."""

    forward_s: float
    backward: tuple[tuple[str, float], ...]
    """Parameters in the order in which backward finishes them, with the time since the one before (the first one's:
    since forward ended, with the loss)."""
    optimizer_s: float = 0.0

    @property
    def backward_s(self) -> float:
        return sum(seconds for _, seconds in self.backward)

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s

    def scaled(self, factor: float) -> Profile:
        """The same step, so many times slower."""
        return Profile(
            forward_s=self.forward_s * factor,
            backward=tuple((name, seconds * factor) for name, seconds in self.backward),
            optimizer_s=self.optimizer_s * factor,
        )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Profile:
        try:
            return cls.of(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"the profile {path} cannot be read: {error}; give a file with forward_s and backward"
            ) from None

    @classmethod
    def of(cls, table: dict[str, Any]) -> Profile:
        backward = tuple((str(name), float(seconds)) for name, seconds in table["backward"])
        return cls(
            forward_s=float(table["forward_s"]), backward=backward, optimizer_s=float(table.get("optimizer_s", 0.0))
        )
