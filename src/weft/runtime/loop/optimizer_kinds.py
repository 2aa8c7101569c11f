"""Which optimizers treat every value, or every parameter, by itself: one table for servers and for deferred updates."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from weft.numerics import Lamb, Lars


def _of(names: str) -> frozenset[type[Optimizer]]:
    return frozenset(getattr(torch.optim, name) for name in names.split() if hasattr(torch.optim, name))


ELEMENTWISE = _of("SGD Adam AdamW Adagrad RMSprop Adadelta Adamax NAdam RAdam Rprop ASGD")
"""Every value by itself, so that a parameter may be cut."""
PER_PARAMETER = _of("Adafactor Muon") | {Lamb, Lars}
"""Every parameter by itself, as a whole."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether a parameter may be cut into ranges that are updated apart."""
    return type(optimizer) in ELEMENTWISE


def is_separable(optimizer: Optimizer) -> bool:
    """Whether parameters may be updated one after another. A class derived from a known one may do anything."""
    return type(optimizer) in ELEMENTWISE | PER_PARAMETER
