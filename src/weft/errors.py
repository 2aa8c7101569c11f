"""The error tree. What was wrong, the value that was given, what to do.

WeftError
├── UserError (ValueError)      the user can mend it: one sentence, exit status 2
│   ├── SpellingError           a strategy, size or name that cannot be read
│   ├── Conflict                two answers that cannot stand together
│   └── JobError                a job, folder, port or machine that cannot be used
├── PayloadError (ValueError)   bytes from a peer that no compressor of this run has written
├── LoopError (RuntimeError)    the training loop did something that would train silently wrong
└── PeerLost (RuntimeError)     another worker went away; the cause is in that worker's log
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WeftError(Exception):
    """Anything that Weft raises on purpose."""


class UserError(WeftError, ValueError):
    """Bad input: one clear sentence with a remedy."""


class SpellingError(UserError):
    """Text that does not spell what it should."""


class Conflict(UserError):
    """Two answers that cannot stand together, why, and what could instead."""

    def __init__(self, one: str, other: str, *, why: str, instead: str) -> None:
        super().__init__(f"{one} cannot stand with {other}: {why}. Try {instead}.")
        self.one, self.other, self.why, self.instead = one, other, why, instead


class JobError(UserError):
    """A job, folder, port or machine that cannot be used as asked."""


class PayloadError(WeftError, ValueError):
    """A payload from the wire that cannot be decoded; nothing of it was applied."""


class LoopError(WeftError, RuntimeError):
    """The training loop asked for something that would train silently wrong."""


class PeerLost(WeftError, RuntimeError):
    """A peer went away in the middle of an exchange."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A half sentence that suggests what was meant: `; did you mean 'ring'?`, or the whole list when short."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    close.sort(key=lambda name: (-difflib.SequenceMatcher(None, name, word).ratio(), name[:1] != word[:1]))
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(names)}" if names else ""
