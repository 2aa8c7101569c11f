"""The precedence of strategies: the command line, WEFT_STRATEGY, weft.toml beside the job, the call, the default."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import weft
from weft.environment import RunOptions, UserSettings
from weft.errors import SpellingError
from weft.strategy import Strategy

if TYPE_CHECKING:
    from weft.runtime.launch.world import World

DEFAULT = "the default"
COMMAND_LINE = "the command line"


def announce(strategy: Strategy, source: str, world: World) -> None:
    """Print one line about the run, under every launcher."""
    workers = f"{world.workers} worker{'s' * (world.workers != 1)}"
    sys.stderr.write(f"weft {weft.__version__}: {workers}, {strategy} (from {source})\n")
    sys.stderr.flush()


def winner(called: str | Strategy | None, job: Path | None = None) -> tuple[str, Strategy]:
    """The source of the strategy, and the strategy itself."""
    told = RunOptions.from_env()
    if told.strategy:
        return told.strategy_source or COMMAND_LINE, Strategy.parse(told.strategy)
    if spelled := UserSettings.from_env().strategy:
        return UserSettings.names()["strategy"], Strategy.parse(spelled)
    beside = (job or Path(sys.argv[0] or ".")).absolute().parent / "weft.toml"
    if beside.is_file():
        try:
            table = tomllib.loads(beside.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SpellingError(f"{beside} is not TOML: {error}") from None
        if "strategy" in table:
            return str(beside), Strategy.from_table(table["strategy"])
    if called is not None:
        return "weft.init()", called if isinstance(called, Strategy) else Strategy.parse(called)
    return DEFAULT, Strategy()
