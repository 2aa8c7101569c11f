"""The time that a comparison still takes, from the durations of its finished runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from weft.lab.progress import Progress


class Forecast:
    """Follows a comparison. `left_s` and `elapsed_s` count from the first run that is compared."""

    def __init__(self) -> None:
        self.left_s = self.elapsed_s = 0.0
        self._lasted: dict[str, list[float]] = {}
        self._running, self._since = "", 0.0

    def see(self, progress: Progress, now: float) -> None:
        """Take in the state of the comparison at a moment of a monotonic clock."""
        if progress.running != self._running:
            if self._running in progress.forecast_s:
                self._lasted.setdefault(self._running, []).append(now - self._since)
            self._running, self._since = progress.running, now
        running_s = now - self._since if self._running in progress.forecast_s else 0.0
        self.elapsed_s = sum(map(sum, self._lasted.values())) + running_s
        seeds = progress.spec.seeds
        runs = {name: 0 if name in progress.errors else seeds for name in progress.forecast_s}
        self.left_s = time_left(progress.forecast_s, self._lasted, runs, self._running, running_s)


def time_left(
    predicted_s: Mapping[str, float],
    lasted_s: Mapping[str, Sequence[float]],
    runs: Mapping[str, int],
    running: str,
    running_s: float,
) -> float:
    """The time for what is left of `runs`, by contender.

    A contender's next run lasts as long as its finished ones. One that has not run yet lasts as long as predicted,
    corrected by the ratio of measured to predicted times of those that have.
    """
    measured_s = {name: statistics.mean(each) for name, each in lasted_s.items()}
    predicted = sum(predicted_s[name] for name in measured_s)
    ratio = sum(measured_s.values()) / predicted if predicted else 1.0
    run_s = {name: measured_s.get(name, seconds * ratio) for name, seconds in predicted_s.items()}
    left = sum(max(0, count - len(lasted_s.get(name, ()))) * run_s[name] for name, count in runs.items())
    return left - min(running_s, run_s.get(running, 0.0))
