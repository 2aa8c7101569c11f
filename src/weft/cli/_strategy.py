"""Strategies on the command line; the name of a system or a peer in their place is recognized."""

from __future__ import annotations

import re

from weft import systems
from weft.axis import AXES, catalogue
from weft.errors import SpellingError, UserError, closest
from weft.strategy import Strategy


def parse_strategy(text: str) -> Strategy:
    """The strategy of this spelling."""
    try:
        return Strategy.parse(text)
    except SpellingError:
        from weft.lab import peers

        name = text.strip()
        baseline = name in peers.catalogue() and not peers.find(name).hidden
        if systems.is_known(name):
            also = f" (to `weft compare` also --peers {name})" if baseline else ""
            remedy = f"see `weft systems {name}`, or pass --system {name}{also}"
            raise UserError(f"'{name}' is a system, not a strategy; {remedy}") from None
        if baseline:
            raise UserError(f"'{name}' is a peer, not a strategy; pass --peers {name} to `weft compare`") from None
        answers = [answer for axis in AXES for answer in catalogue(axis)]
        if re.fullmatch(r"[\w-]+", name) and closest(name, answers) is None:
            near = closest(name, systems.names())
            if near is not None:
                raise UserError(f"there is no answer '{name}'; did you mean the system '{near}'?") from None
        raise
