"""Errors that the user can correct, as one sentence in a process that no launcher of Weft has started."""

from __future__ import annotations

import sys
from types import TracebackType

from weft.environment import LocalLauncher
from weft.errors import UserError

_usual = sys.__excepthook__


def show_user_errors_briefly() -> None:
    """Let an uncaught UserError end this process with one sentence and status 2, as it ends the command line.

    Under a launcher of Weft, and in an interactive interpreter, everything stays as it is.
    """
    global _usual
    if LocalLauncher.from_env().failures is None and not hasattr(sys, "ps1") and sys.excepthook is not _show:
        _usual, sys.excepthook = sys.excepthook, _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, UserError):
        _usual(kind, error, trace)
        return
    sys.stderr.write(f"weft: {error}\n")
    raise SystemExit(2)
