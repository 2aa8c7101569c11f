"""One process of a run of the lab: `python -m weft.lab.child JOB …`.

    WEFT_HOST="LAB 0 -"   the process goes on as one on this emulated host
    WEFT_SLOW=4x          the process is a straggler; 4x@10%: in a tenth of the steps, drawn by seed and rank
    WEFT_SLEEP=FILE       computing sleeps for the durations of this profile
    WEFT_PROFILE=FILE     the profile of this process is measured and written here
    WEFT_PEER=ddp         the job runs under this peer instead of a strategy

Without any of them it is `weft.runtime.launch.child`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from weft.environment import LabOptions
from weft.lab.exec_on_host import enter
from weft.runtime.launch import child
from weft.runtime.launch.process_groups import die_with_launcher
from weft.runtime.loop.instruments import attached

if TYPE_CHECKING:
    from weft.runtime.loop.instruments import Instrument

MODULE = "weft.lab.child"
"""The `module` of a launch whose processes carry instruments."""


def main() -> None:
    host = LabOptions.from_env().host
    if host is not None:
        lab, number, cpus = host.split()
        enter(lab, int(number), cpus)
    die_with_launcher()  # instruments import torch, which takes seconds; the launcher may be killed meanwhile
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
    options = LabOptions.from_env(env)
    slow = Slow.parse(options.slow) if options.slow else Slow()
    if options.sleep:
        found.append(SleepingCompute(profile=Profile.read(options.sleep), slow=slow))
    elif options.slow:
        found.append(Straggler(slow=slow))
    if options.profile:
        found.append(Profiler(file=options.profile))
    if options.peer:
        found.append(peers.find(options.peer))
    return found


if __name__ == "__main__":
    main()
