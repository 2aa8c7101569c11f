"""Command-line options that describe an emulated cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from weft.errors import UserError

CLUSTER = "Emulated cluster"
BandwidthOption = Annotated[
    str,
    typer.Option(
        metavar="RATE", help="Rate of every link, both ways, as in 1gbit or 100mbit.", rich_help_panel=CLUSTER
    ),
]
LinkOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST=RATE", help="Rate of one host's link, as in 2=100mbit. Repeatable.", rich_help_panel=CLUSTER
    ),
]
SlowOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST=FACTOR",
        help="Slow a host down: 3=4x always, all=4x@10% in a tenth of the steps.",
        rich_help_panel=CLUSTER,
    ),
]


def parse_links(items: Sequence[str] | None) -> dict[int, str]:
    """Parse `2=100mbit` and similar; the cluster parses the rates."""
    links: dict[int, str] = {}
    for item in items or ():
        host, equals, rate = item.partition("=")
        if not equals or not host.isdigit():
            raise UserError(f"--link is '{item}', but must be HOST=RATE, as in 2=100mbit")
        links[int(host)] = rate
    return links
