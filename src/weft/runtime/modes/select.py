"""Which process this is, and which mode carries out its run: the one place that asks."""

from __future__ import annotations

from pathlib import Path

from weft.environment import RunOptions, check_names
from weft.runtime.checkpoint.lifecycle import policy_here
from weft.runtime.launch.strategy_source import announce, winner
from weft.runtime.launch.user_errors import show_user_errors_briefly
from weft.runtime.launch.world import World
from weft.runtime.loop import instruments
from weft.runtime.loop.model_checks import check_data
from weft.runtime.loop.process_run import ProcessRun
from weft.runtime.loop.worker_run import WorkerRun
from weft.runtime.modes import Mode
from weft.runtime.modes.all_reduce import AllReduce
from weft.runtime.modes.foreign import Foreign
from weft.runtime.modes.local_steps import LocalSteps
from weft.runtime.modes.merging import Merging
from weft.runtime.modes.parameter_server import ParameterServer
from weft.runtime.modes.shared_memory import SharedMemory
from weft.runtime.modes.single import Single
from weft.runtime.server.process import ServerRun
from weft.strategy import Strategy


def process_run(
    strategy: str | Strategy | None,
    *,
    steps: int | None,
    seed: int | None,
    device: str | None,
    out: str | Path | None,
    save_every: int | None,
    resume: str | Path | None,
    data: str,
) -> ProcessRun:
    """This process's part in a run: a server's, or that of a process with workers; arguments as of `init`."""
    show_user_errors_briefly()
    check_names()
    check_data(data)
    env = RunOptions.from_env()
    source, chosen = winner(strategy)
    world = World.here().with_servers(chosen)
    if world.process == 0 and world.server is None:
        announce(chosen, source, world)
    steps = env.steps if env.steps is not None else steps
    seed = next(each for each in (env.seed, seed, 0) if each is not None)
    if world.server is not None:
        return ServerRun(world=world, strategy=chosen, steps=steps, seed=seed)
    folder, checkpoint = env.out or out, env.resume or resume
    return WorkerRun(
        mode_of(chosen.check(), world),
        world=world,
        strategy=chosen,
        steps=steps,
        seed=seed,
        device=env.device or device or "auto",
        folder=Path(folder) if folder else None,
        policy=policy_here(save_every),
        resume=Path(checkpoint) if checkpoint else None,
        own_data=data == "own",
    )


def mode_of(strategy: Strategy, world: World) -> type[Mode]:
    """The mode for a strategy; an attached wrapper of another library takes the strategy's place."""
    if instruments.foreign() is not None:
        return Foreign
    if strategy.merges_models:
        return Merging
    if strategy.has_servers:
        return LocalSteps if strategy.has_local_steps else ParameterServer
    if strategy.shares_memory and world.workers > 1:
        return SharedMemory
    return Single if world.alone else AllReduce
