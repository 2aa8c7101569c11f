"""The precedence of strategies: the command line, WEFT_STRATEGY, weft.toml beside the job, the call, the default."""

from __future__ import annotations

import logging
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from weft.environment import RunOptions, UserSettings
from weft.errors import SpellingError

if TYPE_CHECKING:
    from weft.strategy import Strategy

log = logging.getLogger(__name__)

DEFAULT = "the default"


def choose_strategy(called: str | Strategy | None) -> Strategy:
    """The strategy of the run; logged with its source."""
    source, strategy = winner(called)
    log.info("strategy: %s (from %s)", strategy, source)
    return strategy


def winner(called: str | Strategy | None, job: Path | None = None) -> tuple[str, Strategy]:
    """The source of the strategy, and the strategy itself."""
    from weft.strategy import Strategy  # imports torch

    if spelled := RunOptions.from_env().strategy:
        return "the command line", Strategy.parse(spelled)
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
