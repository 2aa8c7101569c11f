"""The class of all commands: options in groups, and one sentence after Ctrl-C."""

from __future__ import annotations

import signal
from typing import Any

from typer.core import TyperCommand

from weft.runtime.launch.supervise import Terminated


class Command(TyperCommand):
    """A command whose `--help` shows options under the heading that is their `rich_help_panel`."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Terminated("stopped", signal.SIGINT) from None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options in the order of their definition."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            heading = getattr(param, "rich_help_panel", None) or usual
            if (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)
