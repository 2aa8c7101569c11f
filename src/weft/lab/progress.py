"""The progress of a comparison: finished runs, the run that is under way, and the rows so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weft.lab.contender import Contender
from weft.lab.figures import Sample
from weft.lab.rows import Reference, Row, finished_row, unfinished_row
from weft.lab.spec import CompareSpec
from weft.profile import Profile


@dataclass(kw_only=True)
class Progress:
    """The state of a comparison, for a caller that watches it (`watch=`)."""

    spec: CompareSpec
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    """Finished runs by contender."""
    errors: dict[str, str] = field(default_factory=dict)
    alone: list[Sample] = field(default_factory=list)
    """Finished runs in which all hosts compute and nothing is sent."""
    one_host: Sample | None = None
    links: list[dict[str, Any]] = field(default_factory=list)
    threads: int = 1
    emulated: bool = True
    profile: Profile | None = None
    """The durations that sleeping compute sleeps for."""
    running: str = ""
    """The contender that runs now; empty between runs."""
    event: dict[str, Any] = field(default_factory=dict)
    """The latest event of the run that is under way."""
    expected_s: float | None = None
    """The predicted time of all runs; None before one host has been measured."""
    forecast_s: dict[str, float] = field(default_factory=dict)
    """The predicted time of one run, by contender."""
    interrupted: bool = False

    @property
    def reference(self) -> Reference:
        return Reference(
            hosts=self.spec.hosts,
            compute=self.spec.compute,
            one_host=self.one_host,
            alone=tuple(self.alone),
            payload_bytes_s=self.payload_bytes_s,
        )

    @property
    def payload_bytes_s(self) -> float | None:
        """The payload rate of the slowest link; None where links are not measured."""
        return min((link["payload_bytes_s"] for link in self.links), default=None)

    def rows(self) -> list[Row]:
        reference = self.reference
        return [self._row(contender, reference) for contender in self.spec.contenders]

    def _row(self, contender: Contender, reference: Reference) -> Row:
        samples, error = self.samples.get(contender.name), self.errors.get(contender.name)
        if samples:
            return finished_row(contender, samples, error, reference)
        reason = error or ("stopped before it ran" if self.interrupted else "not run yet")
        return unfinished_row(contender, reason, self.spec.compute)
