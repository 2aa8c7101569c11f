"""A training loop, distributed. Read this first, then `modes/__init__.py`.

    run = weft.init()
    model, optimizer = run.distribute(model, optimizer)
    for x, y in run.shard(loader):
        loss = loss_fn(model(x), y)
        loss.backward()                  # hooks hand gradients to the mode; when it returns, they are the mean
        optimizer.step(); optimizer.zero_grad()
        run.log(loss=loss)

Model and optimizer stay the user's own objects. `mode_of` chooses how the run is carried out, in one place; everything
else delegates: to the mode, to `loop/` (optimizer, data), `checkpoint/lifecycle` and `record/`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.environment import RunOptions, Timeouts
from weft.errors import LoopError, UserError
from weft.ops import Spec
from weft.runtime.checkpoint.lifecycle import Lifecycle, policy_here
from weft.runtime.checkpoint.state import Parts
from weft.runtime.launch.strategy_source import choose_strategy
from weft.runtime.launch.world import World
from weft.runtime.loop import instruments
from weft.runtime.loop.data_position import DataPosition
from weft.runtime.loop.data_sharding import Dealer, Shard
from weft.runtime.loop.logical_workers import Passes
from weft.runtime.loop.model_checks import check_model, check_reduction, check_samples
from weft.runtime.loop.optimizer import PatchedOptimizer
from weft.runtime.loop.rng import seed_everything
from weft.runtime.loop.sample_shares import Count
from weft.runtime.modes import Mode, RunContext
from weft.runtime.modes.all_reduce import AllReduce
from weft.runtime.modes.foreign import Foreign
from weft.runtime.modes.local_steps import LocalSteps
from weft.runtime.modes.parameter_server import ParameterServer
from weft.runtime.modes.shared_memory import SharedMemory
from weft.runtime.modes.single import Single
from weft.runtime.record.clock import Clock
from weft.runtime.record.describe import describe_model, open_recorder
from weft.runtime.record.files import write_json
from weft.runtime.record.phases import PhaseTimer
from weft.runtime.server.process import ServerRun
from weft.store.checkpoint import Policy
from weft.strategy import Strategy
from weft.transport.collective import Processes


def init(
    strategy: str | Strategy | None = None,
    *,
    steps: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    save_every: int | None = None,
    resume: str | Path | None = None,
) -> Run:
    """Join the run that this process belongs to; alone, a run of one worker.

    Options of the command line (`weft train`) take precedence over these. `steps` bounds the optimizer steps of
    `run.shard`; `seed` seeds torch, numpy and random. A run with a folder `out` saves itself every `save_every` steps
    and when it ends; 0: never. `resume` is a checkpoint to resume from.
    """
    global _current, joined
    if _current is not None:
        raise LoopError("weft.init() ran twice; keep the run it returned, or close() it first")
    joined = True
    env = RunOptions.from_env()
    chosen = choose_strategy(strategy)
    world = World.here().with_servers(chosen)
    steps = env.steps if env.steps is not None else steps
    seed = next(each for each in (env.seed, seed, 0) if each is not None)
    if world.server is not None:
        return cast(Run, ServerRun(world=world, strategy=chosen, steps=steps, seed=seed))
    _current = Run(
        world=world,
        strategy=chosen,
        steps=steps,
        seed=seed,
        device=env.device or device or "auto",
        out=env.out or out,
        policy=policy_here(save_every),
        resume=env.resume or resume,
    )
    return _current


_current: Run | None = None
joined = False
"""Whether this process has ever called init."""


def close(*, well: bool = True) -> None:
    """Close the present run, if there is one."""
    if _current is not None:
        _current.close(well=well)


def mode_of(strategy: Strategy, world: World, wrapper: instruments.ForeignWrapper | None) -> type[Mode]:
    """How this run is carried out."""
    if wrapper is not None:
        return Foreign
    if strategy.has_servers:
        return LocalSteps if strategy.has_local_steps else ParameterServer
    if strategy.shares_memory and world.workers > 1:
        return SharedMemory
    return Single if world.alone else AllReduce


class Run:
    """One process's part of a training run."""

    def __init__(
        self,
        *,
        world: World,
        strategy: Strategy,
        steps: int | None,
        seed: int,
        device: str,
        out: str | Path | None,
        policy: Policy | None = None,
        resume: str | Path | None = None,
    ) -> None:
        self.world, self.strategy, self.steps, self.seed = world, strategy.check(), steps, seed
        self.device = world.device(device)
        self.folder = Path(out) if out else None
        seed_everything(seed)
        timeout_s = Timeouts.from_env().timeout_s
        self._wrapper = instruments.foreign()
        self._kind = mode_of(strategy, world, self._wrapper)
        if self._kind.connects:
            world.connect(self.device, timeout_s)
        elif self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        staged = self.device.type == "cuda" and world.shared_gpus
        mesh = world.mesh(timeout_s) if self._kind.connects else None
        self._transport = Processes(strategy.topology, world.layout, staged=staged, mesh=mesh)
        self._passes, self._position = Passes(world.layout, seed), DataPosition()
        clock = Clock(self.device)
        self._recorder = open_recorder(self.folder, strategy, world, clock, seed, steps)
        self._phases = PhaseTimer(clock, self._recorder)
        self._context = RunContext(
            strategy=strategy,
            world=world,
            device=self.device,
            seed=seed,
            folder=self.folder,
            timeout_s=timeout_s,
            transport=self._transport,
            passes=self._passes,
            clock=clock,
            phases=self._phases,
        )
        self._lifecycle = Lifecycle(
            strategy=strategy,
            steps=steps,
            seed=seed,
            folder=self.folder,
            requested_policy=policy,
            resume=Path(resume) if resume else None,
            passes=self._passes,
            position=self._position,
            transport=self._transport,
            phases=self._phases,
            timeout_s=timeout_s,
        )
        self._mode: Mode | None = None
        self._report: dict[str, Any] = {}
        self._closed = False
        atexit.register(self._exit)

    # --- this process -----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The logical worker whose pass it is; its data order and random numbers follow from this number."""
        return self._passes.rank

    @property
    def workers(self) -> int:
        """Logical workers of the run."""
        return self.world.workers

    @property
    def passes(self) -> int:
        """Logical workers that this process carries: the loop's body runs once for each of them in a step."""
        return self._passes.count

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that should print and save."""
        return self.world.process == 0

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        return self._passes.step

    # --- the three lines --------------------------------------------------------------------------------------------

    def distribute(
        self, model: nn.Module, optimizer: Optimizer, *followers: Any, unused: bool = False, reduction: str = "mean"
    ) -> Any:
        """Make model and optimizer part of the run; returns the same objects.

        `followers` step along and are kept in checkpoints: schedulers, a GradScaler, an average of the weights, a
        torch.Generator; any object with a state_dict. `unused=True` where parameters may get a gradient in one step and
        none in another. `reduction="sum"` where the loss is a sum over the batch: gradients are then added up
        undivided, and a missing batch adds nothing.
        """
        if self._mode is not None:
            raise UserError("run.distribute() ran twice; put several models into one nn.ModuleDict")
        check_model(model, optimizer, self.device, self._passes)
        if check_reduction(reduction, self.strategy.synchrony):
            self._passes.add_up()
        specs = [Spec(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters() if p.requires_grad]
        if self.folder is not None and self.is_main:
            describe_model(self.folder, specs)
        for instrument in instruments.current():
            instrument.attach(self, model, optimizer)
        mode = self._mode = self._kind(self._context, model, optimizer, followers, unused=unused)
        parts = Parts(
            model=model,
            optimizer=optimizer,
            followers=followers,
            passes=self._passes,
            position=self._position,
            mode=mode,
        )
        mode.attach(self._lifecycle.open(parts, specs, self._recorder))
        self._phases.attach(model)
        PatchedOptimizer(optimizer, followers, mode)
        self._passes.part_streams()
        self._lifecycle.opened()
        if self._wrapper is not None:
            model, optimizer = self._wrapper.wrap(model, optimizer)
        return (model, optimizer, *followers)

    def shard(
        self, loader: Iterable[Any], *, epochs: int | None = 1, own: bool = False, samples: Count | None = None
    ) -> Shard:
        """This worker's batches of `loader`, which every process builds alike.

        Batches are dealt to the workers in turn. `epochs=None` repeats the loader until the run's steps are used up.
        `own=True`: the loader already holds only this worker's data; lengths may differ. `samples` counts a batch where
        its first dimension does not: the loss is a mean over tokens, or the batch is the second dimension. A worker's
        gradient is weighted by its count over that of all workers; 0 adds nothing.
        """
        check_samples(samples, own, self.strategy.synchrony)
        dealer = Dealer(
            workers=self.workers,
            passes=self._passes,
            transport=self._transport,
            position=self._position,
            seed=self.seed,
        )
        return Shard(dealer, loader, epochs, own, self._lifecycle, samples)

    def log(self, **values: float | Tensor) -> None:
        """Values of this step for the run folder; tensors are read later, so the device is not stalled."""
        kept = {key: v.detach().clone() if isinstance(v, Tensor) else v for key, v in values.items()}
        self._phases.log(kept, self._passes.share)

    # --- optional calls of a loop -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward inside adds gradients up locally; the next one outside exchanges the sum."""
        self._passes.accumulating = True
        try:
            yield
        finally:
            self._passes.accumulating = False

    def clip(self, norm: float) -> Tensor:
        """Scale gradients so that their global norm is at most `norm`; returns the norm before."""
        assert self._mode is not None, "run.distribute() comes first"
        self._mode.check_clip()
        if not self._passes.complete:
            return torch.zeros(())
        return nn.utils.clip_grad_norm_(self._mode.model.parameters(), norm)

    def report(self, **values: float | Tensor) -> None:
        """Final figures for the summary, such as a held-out loss."""
        self._report |= {k: v.item() if isinstance(v, Tensor) else v for k, v in values.items()}

    def save(self) -> None:
        """Save the run now, within a step at its end; in a loop over `run.shard` this happens by itself."""
        self._lifecycle.save()

    def close(self, *, well: bool = True) -> None:
        """Write what is left and leave the group. Runs at exit by itself."""
        global _current
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._exit)
        if _current is self:
            _current = None
        mode = self._mode
        try:
            if mode is not None:
                mode.settle() if well else mode.flush()
            self._lifecycle.close(well=well)
            if mode is not None:
                mode.close(well=well or self._lifecycle.left)
            if self._recorder:
                self._recorder.close()
            if self._report and self.folder and self.is_main:
                write_json(self.folder / "report.json", self._report)
        finally:
            if mode is not None:
                mode.detach()
            if self._transport.talk is not None:
                self._transport.talk.close()
            if dist.is_initialized() and not self._stuck:
                dist.destroy_process_group()

    def _exit(self) -> None:
        self.close(well=getattr(sys, "last_value", None) is None)
        if self._stuck:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    @property
    def _stuck(self) -> bool:
        """Whether the collective library may wait for a silent peer, so that leaving in order would hang."""
        return self._transport.talk is not None and self._transport.talk.silent is not None
