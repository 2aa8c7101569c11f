"""Command-line options of `weft train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli._cluster import CLUSTER

JOB = "Job and strategy"
MACHINES = "Processes and machines"
CHECKPOINTS = "Checkpoints"
OUTPUT = "Output"

Job = Annotated[str | None, typer.Argument(help="A script, or a bundled job: text, wide, vision. Not with --resume.")]
Args = Annotated[list[str] | None, typer.Argument(help="Arguments of the job, after --.")]
StrategyText = Annotated[
    str | None,
    typer.Option(
        help='Strategy, as in "bsp / ring / wfbp", or @file.toml. May be left out: the job chooses, else bsp / direct.',
        rich_help_panel=JOB,
    ),
]
System = Annotated[
    str | None, typer.Option(help="Strategy of a published system (see `weft systems`).", rich_help_panel=JOB)
]
Steps = Annotated[int | None, typer.Option(help="Number of optimizer steps to stop after.", rich_help_panel=JOB)]
Seed = Annotated[int | None, typer.Option(help="Seed of torch, numpy, random and the data order.", rich_help_panel=JOB)]

Workers = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--workers",
        help="Total number of logical workers; 1 by default, or one per host.",
        rich_help_panel=MACHINES,
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        help="Number of processes that carry the workers; one per worker by default.", rich_help_panel=MACHINES
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=MACHINES)]
ShareGpus = Annotated[
    bool, typer.Option("--share-gpus", help="Several processes share one GPU, with Gloo.", rich_help_panel=MACHINES)
]
Nodes = Annotated[int, typer.Option(help="Number of machines.", rich_help_panel=MACHINES)]
NodeRank = Annotated[int, typer.Option(help="Number of this machine, from 0; needs --nodes.", rich_help_panel=MACHINES)]
Rendezvous = Annotated[
    str,
    typer.Option(metavar="HOST:PORT", help="Address of node 0, at which all machines meet.", rich_help_panel=MACHINES),
]
NetworkText = Annotated[
    str,
    typer.Option(
        help="Network between machines: trusted, or untrusted, which encrypts all traffic.", rich_help_panel=MACHINES
    ),
]
KeyFile = Annotated[
    Path | None, typer.Option(help="Key for parameter servers (see `weft key`).", rich_help_panel=MACHINES)
]
Join = Annotated[
    int,
    typer.Option(
        help="Leave this many processes (the highest ranks) to be started elsewhere with `weft join`.",
        rich_help_panel=MACHINES,
    ),
]

Hosts = Annotated[
    int | None,
    typer.Option(
        help="Number of emulated hosts, each with its own link. --bandwidth, --link and --slow need it.",
        rich_help_panel=CLUSTER,
    ),
]

SaveEvery = Annotated[
    int | None,
    typer.Option(help="Steps between checkpoints; 500 by default, 0 for no checkpoints.", rich_help_panel=CHECKPOINTS),
]
KeepLast = Annotated[int, typer.Option(help="Number of latest checkpoints to keep.", rich_help_panel=CHECKPOINTS)]
KeepEvery = Annotated[
    int, typer.Option(help="Keep checkpoints at multiples of this many steps for good.", rich_help_panel=CHECKPOINTS)
]
Resume = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="Resume a run from its latest complete checkpoint.", rich_help_panel=CHECKPOINTS),
]
Grace = Annotated[
    float, typer.Option(help="Seconds to save and exit after SIGTERM or Ctrl-C.", rich_help_panel=CHECKPOINTS)
]

Out = Annotated[Path | None, typer.Option(help="Run folder; a new one in runs/ by default.", rich_help_panel=OUTPUT)]
Trace = Annotated[bool, typer.Option("--trace", help="Write a trace for ui.perfetto.dev.", rich_help_panel=OUTPUT)]
