"""Options that are given and would have no effect are refused, with a remedy."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from weft.errors import UserError


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option is on the command line, even with its default value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse(context: typer.Context, names: Sequence[str], remedy: str) -> None:
    """Refuse the options of these names that are given."""
    for name in names:
        if is_given(context, name):
            raise UserError(f"--{name.replace('_', '-')} has no effect {remedy}")


def check_train_options(context: typer.Context) -> None:
    """The options of `weft train` that depend on other options."""
    if context.params["hosts"] is None:
        refuse(context, ("bandwidth", "link", "slow"), "without emulated hosts; add --hosts, or omit it")
    else:
        machines = ("node_rank", "rendezvous", "key_file", "join", "network")
        refuse(context, machines, "with --hosts, which emulates the machines; omit one of them")
    if context.params["save_every"] == 0:
        without = "with --save-every 0, which writes no checkpoints; omit one of them"
        refuse(context, ("keep_last", "keep_every", "grace"), without)
    if context.params["device"] == "cpu":
        refuse(context, ("share_gpus",), "with --device cpu; omit one of them")


def check_machine_options(context: typer.Context, *, servers: bool) -> None:
    """The options of `weft train` for several machines, of which some depend on the strategy."""
    if not servers:
        refuse(context, ("key_file",), "without parameter servers; choose a strategy that has them, or omit it")
    if is_given(context, "nodes"):
        return
    several = "on one machine; add --nodes, or omit it"
    refuse(context, ("node_rank",), several)
    if not servers:
        refuse(context, ("rendezvous", "network"), several)
    elif not context.params["rendezvous"]:
        refuse(context, ("network",), several)
