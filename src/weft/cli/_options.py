"""Command-line options of `weft train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# --- the run --------------------------------------------------------------------------------------------------------

Job = Annotated[
    str | None, typer.Argument(help="A script, or a bundled job: text, wide, vision; not needed with --resume.")
]
Args = Annotated[list[str] | None, typer.Argument(help="Arguments of the job, after --.")]
Workers = Annotated[
    int | None,
    typer.Option("-n", "--workers", help="Total number of logical workers; 1 by default, or one per host."),
]
StrategyText = Annotated[str | None, typer.Option(help='Strategy, as in "bsp / ring / wfbp", or @file.toml.')]
System = Annotated[str | None, typer.Option(help="Strategy of a surveyed system (see `weft systems`).")]
Steps = Annotated[int | None, typer.Option(help="Number of optimizer steps to stop after.")]
Seed = Annotated[int | None, typer.Option(help="Seed of torch, numpy, random and the data order.")]
Out = Annotated[Path | None, typer.Option(help="Run folder; a new one in runs/ by default.")]
Trace = Annotated[bool, typer.Option("--trace", help="Write a trace for ui.perfetto.dev.")]

# --- processes and machines -----------------------------------------------------------------------------------------

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Processes = Annotated[
    int | None, typer.Option(help="Number of processes that carry the workers; one per worker by default.")
]
Nodes = Annotated[int, typer.Option(help="Number of machines.")]
NodeRank = Annotated[int, typer.Option(help="Number of this machine, from 0.")]
Rendezvous = Annotated[str, typer.Option(metavar="HOST:PORT", help="Rendezvous of the machines, on node 0.")]
KeyFile = Annotated[Path | None, typer.Option(help="Key for parameter servers on several machines (see `weft key`).")]
Join = Annotated[
    int, typer.Option(help="Number of processes (the highest ranks) that will be started elsewhere with `weft join`.")
]
NetworkText = Annotated[
    str, typer.Option(help="Network between machines: trusted, or untrusted, which encrypts all traffic.")
]
ShareGpus = Annotated[bool, typer.Option("--share-gpus", help="Several processes share one GPU, with Gloo.")]
Hosts = Annotated[int | None, typer.Option(help="Number of emulated hosts, each with its own link.")]

# --- checkpoints ----------------------------------------------------------------------------------------------------

SaveEvery = Annotated[int | None, typer.Option(help="Steps between checkpoints; 500 by default, 0 for no checkpoints.")]
KeepLast = Annotated[int, typer.Option(help="Number of latest checkpoints to keep.")]
KeepEvery = Annotated[int, typer.Option(help="Keep checkpoints at multiples of this many steps for good.")]
Resume = Annotated[Path | None, typer.Option(metavar="RUN", help="Resume a run from its latest complete checkpoint.")]
Grace = Annotated[float, typer.Option(help="Seconds to save and exit after SIGTERM.")]
