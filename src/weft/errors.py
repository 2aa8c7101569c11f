"""The error tree. A message names the fault, the value that was given and the remedy.

WeftError
├── UserError (ValueError)      bad input that the user can correct: one sentence, exit status 2
│   ├── SpellingError           a strategy, size or name that cannot be parsed
│   ├── Conflict                two answers that cannot be combined
│   └── JobError                a job, folder, port or machine that cannot be used
├── PayloadError (ValueError)   bytes from a peer that no compressor of this run can have written
├── LoopError (RuntimeError)    the training loop did something that would silently train wrong
└── PeerLost (RuntimeError)     another worker was lost; the cause is in that worker's log
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WeftError(Exception):
    """Base class of every error that Weft raises on purpose."""


class UserError(WeftError, ValueError):
    """Bad input: one clear sentence with a remedy."""


class SpellingError(UserError):
    """Text that cannot be parsed as a strategy, size or name."""


class Conflict(UserError):
    """Two answers that cannot be combined, the reason, and an alternative."""

    def __init__(self, one: str, other: str, *, why: str, instead: str) -> None:
        super().__init__(f"{one} cannot be combined with {other}: {why}. Try {instead}.")
        self.one, self.other, self.why, self.instead = one, other, why, instead


class JobError(UserError):
    """A job, folder, port or machine that cannot be used."""


class PayloadError(WeftError, ValueError):
    """A payload from the wire that cannot be decoded. None of it is applied."""


class LoopError(WeftError, RuntimeError):
    """The training loop did something that would silently train wrong."""


class PeerLost(WeftError, RuntimeError):
    """A peer was lost during an exchange."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known name that this word most resembles; None if none is close."""
    close = difflib.get_close_matches(word, sorted(known), n=3, cutoff=0.5)
    close.sort(key=lambda name: (-difflib.SequenceMatcher(None, name, word).ratio(), name[:1] != word[:1]))
    return close[0] if close else None


def nearest(word: str, known: Iterable[str], *, listed_by: str = "") -> str:
    """A clause with the closest known name, `; did you mean 'ring'?`. If none is close, it names the command that lists
    them, or without one all of them."""
    names = sorted(known)
    close = closest(word, names)
    if close is not None:
        return f"; did you mean '{close}'?"
    if listed_by:
        return f"; see `{listed_by}`"
    return f"; known: {', '.join(names)}" if names else ""
