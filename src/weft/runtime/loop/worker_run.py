"""The part of a process with workers in a run: its connections, its mode, its data, and what it records.

`weft.init()` makes one in every process that carries workers, and `Run` delegates to it. A server process has a
`ServerRun` in its place (`server/process.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.environment import Timeouts
from weft.errors import UserError
from weft.ops import Spec
from weft.runtime.checkpoint.lifecycle import Lifecycle
from weft.runtime.checkpoint.state import Parts
from weft.runtime.launch.world import World
from weft.runtime.loop import instruments, refusals
from weft.runtime.loop.data_position import DataPosition
from weft.runtime.loop.data_sharding import Dealer
from weft.runtime.loop.devices import move_batch, move_training
from weft.runtime.loop.epochs import Epochs
from weft.runtime.loop.evaluation import Evaluation
from weft.runtime.loop.logical_workers import Passes
from weft.runtime.loop.model_checks import check_model, check_reduction, check_samples
from weft.runtime.loop.optimizer import PatchedOptimizer
from weft.runtime.loop.reductions import Reductions
from weft.runtime.loop.rng import seed_everything
from weft.runtime.loop.sample_shares import Count
from weft.runtime.loop.shard import Shard
from weft.runtime.loop.step_hooks import require_before_step
from weft.runtime.modes import Mode, RunContext
from weft.runtime.record.clock import Clock
from weft.runtime.record.describe import describe_model, open_recorder
from weft.runtime.record.files import write_json
from weft.runtime.record.phases import PhaseTimer
from weft.store.checkpoint import Policy
from weft.strategy import Strategy
from weft.topology import Topology
from weft.transport.collective import Processes


@final
class WorkerRun:
    """One process with workers. `Run` documents the public methods."""

    def __init__(
        self,
        kind: type[Mode],
        *,
        world: World,
        strategy: Strategy,
        steps: int | None,
        seed: int,
        device: str,
        folder: Path | None,
        policy: Policy | None,
        resume: Path | None,
        own_data: bool,
    ) -> None:
        self.world, self.strategy, self.steps, self.seed = world, strategy, steps, seed
        self.workers, self.is_main = world.workers, world.process == 0
        self.device, self.folder = world.device(device), folder
        seed_everything(seed)
        timeout_s = Timeouts.from_env().timeout_s
        transport = connect(world, strategy.topology, self.device, timeout_s, group=kind.connects)
        self._passes, self._position = Passes(world.layout, seed), DataPosition()
        clock = Clock(self.device)
        self._recorder = open_recorder(folder, strategy, world, clock, seed, steps)
        self._context = RunContext(
            strategy=strategy,
            world=world,
            device=self.device,
            seed=seed,
            folder=folder,
            timeout_s=timeout_s,
            transport=transport,
            passes=self._passes,
            clock=clock,
            phases=PhaseTimer(clock, self._recorder),
        )
        self._lifecycle = Lifecycle(
            strategy=strategy,
            steps=steps,
            seed=seed,
            folder=folder,
            requested_policy=policy,
            resume=resume,
            passes=self._passes,
            position=self._position,
            transport=transport,
            phases=self._context.phases,
            timeout_s=timeout_s,
        )
        self._kind = kind
        self.mode: Mode | None = None
        """Constructed by `distribute`."""
        self._own_data, self._reductions = own_data, Reductions(transport)
        self._report: dict[str, Any] = {}
        self._closed = False
        self._early = require_before_step(refuse_early_step)
        atexit.register(self._exit)

    @property
    def rank(self) -> int:
        return self._passes.rank

    @property
    def passes(self) -> int:
        return self._passes.count

    @property
    def step(self) -> int:
        return self._passes.step

    @property
    def share(self) -> float:
        """The present worker's share of the step's joined batch."""
        return self._passes.share

    @property
    def transport(self) -> Processes:
        """The exchanges with the other processes."""
        return self._context.transport

    # --- the loop ---------------------------------------------------------------------------------------------------

    def distribute(
        self, model: nn.Module, optimizer: Optimizer, *followers: Any, unused: bool, reduction: str
    ) -> tuple[Any, ...]:
        if self.mode is not None:
            raise UserError("run.distribute() ran twice; put several models into one nn.ModuleDict")
        check_model(model, optimizer, self.device, self._passes)
        move_training(model, optimizer, followers, self.device)
        self._early.remove()
        if check_reduction(reduction, self.strategy.synchrony):
            self._passes.add_up()
        specs = [Spec(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters() if p.requires_grad]
        if self.folder is not None and self.is_main:
            describe_model(self.folder, specs)
        for instrument in instruments.current():
            instrument.attach(self, model, optimizer)
        mode = self.mode = self._kind(self._context, model, optimizer, followers, unused=unused)
        parts = Parts(
            model=model,
            optimizer=optimizer,
            followers=followers,
            passes=self._passes,
            position=self._position,
            mode=mode,
        )
        mode.attach(self._lifecycle.open(parts, specs, self._recorder))
        self._context.phases.attach(model)
        PatchedOptimizer(optimizer, followers, mode, own_data=self._own_data)
        self._passes.part_streams()
        self._lifecycle.opened()
        return (*mode.loop_objects(), *followers)

    def shard(
        self, loader: Iterable[Any], *, epochs: int | None, own: bool, samples: Count | None, device: bool
    ) -> Shard:
        check_samples(samples, own, self.strategy.synchrony)
        dealer = Dealer(
            workers=self.workers,
            passes=self._passes,
            transport=self.transport,
            position=self._position,
            seed=self.seed,
        )
        return Shard(dealer, loader, epochs, own, self._lifecycle, samples, self._moved if device else _unmoved)

    def _moved(self, batch: Any) -> Any:
        return move_batch(batch, self.device)

    def epochs(self, count: int) -> Epochs:
        return Epochs(count, self._position, self._lifecycle)

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, loader: Iterable[Any], *, device: bool) -> Evaluation:
        return Evaluation(
            loader,
            self.world.layout,
            self.seed,
            model=self._evaluated,
            moved=self._moved if device else _unmoved,
            seen=self._reductions.seen,
        )

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        if self.mode is None:
            yield
            return
        if self._passes.complete and not self._passes.unstepped:
            self.mode.flush()
        with self.mode.merged():
            yield

    @contextlib.contextmanager
    def _evaluated(self) -> Iterator[None]:
        """The model of the last step, complete."""
        stepped = self._passes.complete and not self._passes.unstepped
        if self.mode is not None and stepped and self._ended and not self.strategy.synchrony.lockstep:
            self.mode.fetch_final_model()
        with self.merged():
            yield

    def reductions(self) -> Reductions:
        if not (self.strategy.synchrony.lockstep or self._ended):
            raise refusals.reduced_early(self.strategy.synchrony.name)
        if not (self._passes.complete or self.world.layout.is_even):
            raise refusals.reduced_between_passes()
        return self._reductions

    @property
    def _ended(self) -> bool:
        """Whether this worker has taken its last step."""
        return self._lifecycle.enough() or self._position.finished

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        self._passes.accumulating = True
        try:
            yield
        finally:
            self._passes.accumulating = False

    def clip(self, norm: float) -> Tensor:
        assert self.mode is not None, "run.distribute() comes first"
        self.mode.check_clip()
        if not (self._passes.complete or self.mode.steps_each_pass):
            return torch.zeros(())
        return nn.utils.clip_grad_norm_(self.mode.model.parameters(), norm)

    # --- the run folder ---------------------------------------------------------------------------------------------

    def log(self, **values: float | Tensor) -> None:
        kept = {key: v.detach().clone() if isinstance(v, Tensor) else v for key, v in values.items()}
        self._context.phases.log(kept, self.share)

    def report(self, **values: float | Tensor) -> None:
        self._report |= {k: v.item() if isinstance(v, Tensor) else v for k, v in values.items()}

    def save(self) -> None:
        self._lifecycle.save()

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self, *, well: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._early.remove()
        atexit.unregister(self._exit)
        mode = self.mode
        try:
            if mode is not None:
                if well:
                    self._lifecycle.finish()
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
            if self.transport.talk is not None:
                self.transport.talk.close()
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
        return self.transport.talk is not None and self.transport.talk.silent is not None


def refuse_early_step() -> None:
    raise refusals.stepped_early()


def _unmoved(batch: Any) -> Any:
    return batch


def connect(world: World, topology: Topology, device: torch.device, timeout_s: float, *, group: bool) -> Processes:
    """Connect this process to the others; `group`: whether they form a process group."""
    if group:
        world.connect(device, timeout_s)
    elif device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = world.mesh(timeout_s) if group else None
    return Processes(topology, world.layout, staged=device.type == "cuda" and world.shared_gpus, mesh=mesh)
