"""PyTorch's own ways of distributing, each a file: what people would pick instead, to run the same job under.

A peer wraps the job's model and optimizer as its documentation says, in an environment as torchrun makes it. What it
must move is declared beside it, as for an answer.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from weft.errors import UserError, nearest
from weft.ops import Spec
from weft.runtime.loop.instruments import ForeignWrapper


class Peer(ForeignWrapper):
    """One way of distributing that is not ours."""

    sentence: ClassVar[str]
    """What it is."""
    hidden: ClassVar[bool] = False
    """Whether it is a reference of the lab's own, which nobody names."""
    period: ClassVar[int] = 1
    """Steps after which what it exchanges repeats."""
    sleeps: ClassVar[bool] = True
    """Whether it works where the model's layers are not called."""

    @abstractmethod
    def bytes(self, specs: Sequence[Spec], workers: int) -> float:
        """What one worker must send in a step."""


@functools.cache
def catalogue() -> dict[str, Peer]:
    """Every peer by the name that people use: `ddp-fp16` lies in `ddp_fp16.py`."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            found[module.name.replace("_", "-")] = importlib.import_module(f"{__name__}.{module.name}").PEER
    return found


def find(name: str) -> Peer:
    known = catalogue()
    if name not in known:
        shown = [each for each, peer in known.items() if not peer.hidden]
        raise UserError(f"there is no peer '{name}'{nearest(name, shown)}")
    return known[name]


def all_reduced(specs: Sequence[Spec], workers: int, itemsize: int | None = None) -> float:
    """What a ring all-reduce of every gradient sends: 2 (n-1)/n S."""
    size = sum(spec.numel * (itemsize or spec.dtype.itemsize) for spec in specs)
    return 2 * (workers - 1) / workers * size
