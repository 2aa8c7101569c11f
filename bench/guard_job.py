"""`wide`, with the guard awake in blocks of 20 steps and asleep in those between; see saving.py.

Beside the difference, which this machine's noise may hide, the time inside of the guard is taken, and written to the
file that GUARD_TIMES names.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.jobs import wide
from weft.runtime.checks import replicas
from weft.runtime.checks.step_status import StepStatus

BLOCK = 20
spent = {"steps": 0, "seconds": 0.0}


def awake(step: int) -> bool:
    return step // BLOCK % 2 == 1


def timed(act: Callable[..., Any]) -> Callable[..., Any]:
    def within(*args: Any) -> Any:
        began = time.perf_counter()
        result = act(*args)
        spent["seconds"] += time.perf_counter() - began
        return result

    return within


def sometimes(look: Callable[..., Any], otherwise: Any) -> Callable[..., Any]:
    look = timed(look)
    return lambda self, *args: look(self, *args) if awake(self.step) else otherwise


def begin(self: StepStatus, step: int) -> None:
    spent["steps"] += awake(step)
    replicas.parameter_hash = _hashed if awake(step) else lambda _: 0
    _begin(self, step)


_hashed, _begin = timed(replicas.parameter_hash), StepStatus.begin
StepStatus.begin = begin  # type: ignore[method-assign]
replicas.HASH_EVERY = BLOCK  # five times as often as usual, and only when awake
StepStatus.check_gradients = sometimes(StepStatus.check_gradients, None)  # type: ignore[method-assign]
StepStatus.check_means = sometimes(StepStatus.check_means, True)  # type: ignore[method-assign]

if __name__ == "__main__":
    if os.environ.get("RANK", "0") == "0" and "GUARD_TIMES" in os.environ:
        atexit.register(lambda: Path(os.environ["GUARD_TIMES"]).write_text(json.dumps(spent)))
    wide.main()
