"""What to compare, and on what."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weft import jobs
from weft.errors import JobError, UserError
from weft.lab import peers
from weft.lab.contender import WARMUP, Contender
from weft.lab.instruments.straggler import Slow
from weft.profile import Profile
from weft.runtime.launch.launcher import find_job
from weft.strategy import Strategy

DEFAULTS = (
    "bsp / direct",
    "bsp / direct / priority",
    "bsp / direct / int8",
    "bsp / direct / qsgd(levels=7, norm=max)",
)
"""The strategies that are compared where none is named: the default, overlapped with the next forward, and with 8 and
4 bits a value, which learn as dense gradients do."""
DEFAULT_PEERS = ("ddp",)

MIN_MEASURED = 5
"""The fewest steps after warm-up from which step times are taken."""

Compute = Literal["real", "sleep"]
Links = Literal["emulated", "loopback", "auto"]


@dataclass(frozen=True, kw_only=True)
class CompareSpec:
    """What to compare, and on what."""

    job: str
    args: tuple[str, ...] = ()
    """Arguments of the job."""
    contenders: tuple[Contender, ...]
    hosts: int = 4
    """Number of emulated hosts, with one worker each."""
    bandwidth: str = "1gbit"
    """Rate of every link."""
    links: Mapping[int, str] = field(default_factory=dict)
    """Other rates, by host: `{2: "100mbit"}`."""
    slow: tuple[str, ...] = ()
    """Slow hosts: `("3=4x", "all=4x@10%")`."""
    compute: Compute = "real"
    """`real`, or `sleep`: compute is replaced by its measured duration."""
    profile: Profile | None = None
    """Durations for sleeping compute; None: measured first."""
    steps: int = 30
    """Optimizer steps of each run; the first five are warm-up."""
    seeds: int = 2
    """Number of seeds; every contender runs once with each."""
    target_loss: float | None = None
    """Measure the time to reach this loss."""
    target_held_out: float | None = None
    """Measure the time to reach this held-out loss, evaluation not counted; the job must log `held_out_loss`."""
    network: Links = "emulated"
    """`emulated`; `loopback`: without shaped links; `auto`: loopback if emulation is impossible."""
    out: str | Path | None = None
    """Result folder; a new one in `runs/` by default."""
    command: str = ""

    @property
    def all_hosts(self) -> int:
        """The workers' and, behind them, as many for servers as the contender has that wants most."""
        server_hosts = [home for contender in self.contenders for home in contender.server_hosts(self.hosts)]
        return max([self.hosts, *(home + 1 for home in server_hosts)])

    def checked(self) -> CompareSpec:
        find_job(self.job)
        names = [contender.name for contender in self.contenders]
        if not names:
            raise UserError("there is nothing to compare; name a strategy, a system or a peer")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"'{twice}' is named twice; name each contender once")
        if self.hosts < 2:
            raise UserError(f"--hosts is {self.hosts}, but comparing ways of distributing takes at least 2")
        if self.steps < (least := WARMUP + MIN_MEASURED):
            raise UserError(
                f"--steps is {self.steps}, but the first {WARMUP} steps are warm-up and at least {MIN_MEASURED} are "
                f"measured; give {least} or more"
            )
        if self.seeds < 1:
            raise UserError(f"--seeds is {self.seeds}, but every contender runs with at least 1")
        if self.compute not in ("real", "sleep"):
            raise UserError(f"--compute is '{self.compute}', but must be real or sleep")
        if self.network not in ("emulated", "loopback", "auto"):
            raise UserError(f"--links is '{self.network}', but must be emulated, loopback or auto")
        if self.network == "loopback" and self.links:
            raise UserError("--link has no effect with --links loopback, which shapes no links; omit one of them")
        if self.compute == "sleep" and self.target_loss is not None:
            raise UserError("--target-loss has no effect with --compute sleep, which learns nothing; omit one of them")
        if self.target_held_out is not None:
            self._check_target_held_out(self.target_held_out)
        parse_slow(self.slow, self.hosts)
        for contender in self.contenders:
            if contender.strategy is not None:
                contender.strategy.check()
        return self

    def _check_target_held_out(self, target: float) -> None:
        if not 0 < target < math.inf:
            raise UserError(f"--target-held-out is {target:g}, but must be a loss above 0, as in 2.5")
        if self.compute == "sleep":
            raise UserError(
                "--target-held-out has no effect with --compute sleep, which learns nothing; omit one of them"
            )
        evaluates = find_job(self.job) == jobs.path("text") and any(arg.startswith("--eval") for arg in self.args)
        if find_job(self.job) in map(jobs.path, jobs.names()) and not evaluates:
            raise no_held_out_loss(self.job)


def no_held_out_loss(job: str) -> JobError:
    """A job without the figure that --target-held-out needs."""
    return JobError(
        f"--target-held-out needs a job that logs held_out_loss while it trains, and {job} does not; log it with "
        "run.log(held_out_loss=...) in the loop, or compare text -- --eval-every 20"
    )


def parse_slow(items: Sequence[str], hosts: int) -> dict[int, Slow]:
    """`3=4x`, `all=4x@10%`: what each host named is slowed down by."""
    slow: dict[int, Slow] = {}
    for item in items:
        who, _, what = item.partition("=")
        if who != "all" and not (who.isdigit() and int(who) < hosts):
            raise UserError(
                f"--slow {item} names no host; write HOST=4x with a host from 0 to {hosts - 1}, or all=4x@10%"
            )
        for host in range(hosts) if who == "all" else [int(who)]:
            slow[host] = Slow.parse(what)
    return slow


def contenders(
    strategies: Sequence[str | Strategy | Mapping[str, str]], names: Sequence[str], defaults: bool = True
) -> tuple[Contender, ...]:
    """Strategies and peers as contenders. Without a strategy: the default ones, and without a peer the default one."""
    if not strategies and defaults:
        strategies, names = DEFAULTS, names or DEFAULT_PEERS
    found = []
    for each in strategies:
        if isinstance(each, Mapping):
            found += [Contender(name=name, strategy=Strategy.parse(text)) for name, text in each.items()]
        else:
            strategy = Strategy.parse(each) if isinstance(each, str) else each
            found.append(Contender(name=str(strategy), strategy=strategy))
    for name in names:
        peers.find(name)
        found.append(Contender(name=name, peer=name))
    return tuple(found)


def spelled(spec: CompareSpec) -> str:
    """The command that would do the same."""
    words = ["weft", "compare", spec.job]
    words += [str(contender.strategy) for contender in spec.contenders if contender.strategy is not None]
    named = ",".join(contender.peer for contender in spec.contenders if contender.peer)
    words += ["--peers", named] if named else []
    words += ["--hosts", str(spec.hosts), "--bandwidth", spec.bandwidth]
    for host, rate in spec.links.items():
        words += ["--link", f"{host}={rate}"]
    for each in spec.slow:
        words += ["--slow", each]
    words += ["--compute", spec.compute, "--steps", str(spec.steps), "--seeds", str(spec.seeds)]
    words += ["--target-loss", str(spec.target_loss)] if spec.target_loss is not None else []
    words += ["--target-held-out", str(spec.target_held_out)] if spec.target_held_out is not None else []
    words += ["--links", spec.network] if spec.network != "emulated" else []
    return shlex.join([*words, *(["--", *spec.args] if spec.args else [])])
