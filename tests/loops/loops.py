"""Every training loop, by its name, in the order of the modules below."""

from __future__ import annotations

from tests.loops import compiled, data, gradients, models, optimizers, weights
from tests.loops.common import ENTERED

MODULES = (models, optimizers, gradients, weights, data, compiled)
LOOPS = {name: loop for module in MODULES for name, loop in ENTERED.items() if loop.__module__ == module.__name__}
