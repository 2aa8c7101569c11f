"""One process of a run of the lab: `python -m weft.lab.child JOB …`.

    WEFT_SLOW=4x          the process is a straggler; 4x@10%: in a tenth of the steps, drawn by seed and rank
    WEFT_SLEEP=FILE       computing sleeps for the durations of this profile
    WEFT_PROFILE=FILE     the profile of this process is measured and written here
    WEFT_PEER=ddp         the job runs under this peer instead of a strategy

Without any of them it is `weft.runtime.launch.child`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from weft.runtime.launch import child
from weft.runtime.launch.process_groups import die_with_parent
from weft.runtime.loop.instruments import attached

if TYPE_CHECKING:
    from weft.runtime.loop.instruments import Instrument

MODULE = "weft.lab.child"
"""The `module` of a launch whose processes carry instruments."""


def main() -> None:
    die_with_parent()  # instruments import torch, which takes seconds; the launcher may be killed meanwhile
    with attached(*instruments(os.environ)):
        child.main()


def instruments(env: Mapping[str, str]) -> list[Instrument]:
    """The instruments that these environment variables ask for."""
    from weft.lab import peers
    from weft.lab.instruments.profiler import Profiler
    from weft.lab.instruments.sleep import SleepingCompute
    from weft.lab.instruments.straggler import Slow, Straggler
    from weft.profile import Profile

    found: list[Instrument] = []
    slow = Slow.parse(env["WEFT_SLOW"]) if env.get("WEFT_SLOW") else Slow()
    if env.get("WEFT_SLEEP"):
        found.append(SleepingCompute(profile=Profile.read(Path(env["WEFT_SLEEP"])), slow=slow))
    elif env.get("WEFT_SLOW"):
        found.append(Straggler(slow=slow))
    if env.get("WEFT_PROFILE"):
        found.append(Profiler(file=Path(env["WEFT_PROFILE"])))
    if env.get("WEFT_PEER"):
        found.append(peers.find(env["WEFT_PEER"]))
    return found


if __name__ == "__main__":
    main()
