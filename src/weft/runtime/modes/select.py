"""Which mode carries out a run: the one place that asks."""

from __future__ import annotations

from weft.runtime.launch.world import World
from weft.runtime.loop import instruments
from weft.runtime.modes import Mode
from weft.runtime.modes.all_reduce import AllReduce
from weft.runtime.modes.foreign import Foreign
from weft.runtime.modes.local_steps import LocalSteps
from weft.runtime.modes.parameter_server import ParameterServer
from weft.runtime.modes.shared_memory import SharedMemory
from weft.runtime.modes.single import Single
from weft.strategy import Strategy


def mode_of(strategy: Strategy, world: World) -> type[Mode]:
    """The mode for a strategy; an attached wrapper of another library takes the strategy's place."""
    if instruments.foreign() is not None:
        return Foreign
    if strategy.has_servers:
        return LocalSteps if strategy.has_local_steps else ParameterServer
    if strategy.shares_memory and world.workers > 1:
        return SharedMemory
    return Single if world.alone else AllReduce
