"""Command-line options of `weft compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli._cluster import CLUSTER
from weft.lab.spec import DEFAULTS

CONTENDERS = "Strategies and peers"
MEASUREMENT = "Measurement"

Job = Annotated[str, typer.Argument(help="A script, or a bundled job: text, wide, vision.")]
Strategies = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="STRATEGY…", help=f"Strategies; by default {', '.join(DEFAULTS)}. After --, the arguments of the job."
    ),
]
Systems = Annotated[
    list[str] | None,
    typer.Option(help="The strategy of a published system. Repeatable.", rich_help_panel=CONTENDERS),
]
Group = Annotated[
    str | None, typer.Option("--systems", help="All systems of a group that run.", rich_help_panel=CONTENDERS)
]
Peers = Annotated[
    str,
    typer.Option(
        help="PyTorch baselines: ddp, ddp-tuned, ddp-fp16, ddp-powersgd, ddp-localsgd, fsdp. By default ddp if "
        "no strategy is named, else none.",
        rich_help_panel=CONTENDERS,
    ),
]

Hosts = Annotated[int, typer.Option(help="Number of emulated hosts, with one worker each.", rich_help_panel=CLUSTER)]
Links = Annotated[
    str,
    typer.Option(
        help="emulated; loopback: links without a shaped rate; auto: loopback if emulation is impossible.",
        rich_help_panel=CLUSTER,
    ),
]

Compute = Annotated[
    str,
    typer.Option(help="real, or sleep: replace compute by its measured duration.", rich_help_panel=MEASUREMENT),
]
Durations = Annotated[
    Path | None,
    typer.Option(
        help="Durations for --compute sleep, as a file; measured first by default.", rich_help_panel=MEASUREMENT
    ),
]
Steps = Annotated[
    int,
    typer.Option(
        help="Optimizer steps of each run, at least 10; the first five are warm-up.", rich_help_panel=MEASUREMENT
    ),
]
Seeds = Annotated[
    int, typer.Option(help="Number of seeds; every contender runs once with each.", rich_help_panel=MEASUREMENT)
]
TargetLoss = Annotated[
    float | None, typer.Option(help="Measure the time to reach this loss.", rich_help_panel=MEASUREMENT)
]

TargetHeldOut = Annotated[
    float | None,
    typer.Option(
        metavar="LOSS",
        help="Measure the time to reach this held-out loss, evaluation excluded. The job must log held_out_loss, as "
        "text -- --eval-every 20 does.",
        rich_help_panel=MEASUREMENT,
    ),
]

Out = Annotated[
    Path | None, typer.Option(help="Result folder; a new one in runs/ by default.", rich_help_panel="Output")
]
