"""A training loop, distributed. Read this first.

    run = weft.init()
    model, optimizer = run.distribute(model, optimizer)
    for x, y in run.shard(loader):
        loss = loss_fn(model(x), y)
        loss.backward()                  # hooks hand gradients to the engine; when it returns, they are the mean
        optimizer.step(); optimizer.zero_grad()
        run.log(loss=loss)

Model and optimizer stay the user's own objects: hooks are attached to the parameters (`gradients`), exchanges run
beside backward (`engine`), batches are dealt to logical workers (`shard`, `passes`), and every step leaves an event
(`record`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.errors import LoopError, UserError
from weft.ops import Spec
from weft.runtime.checkpoint.lifecycle import Lifecycle, policy_here
from weft.runtime.checkpoint.state import Parts
from weft.runtime.checks.finite import LocalFiniteCheck
from weft.runtime.checks.replicas import check_batches
from weft.runtime.engine.engine import Engine
from weft.runtime.launch.malloc import keep_memory
from weft.runtime.launch.strategy_source import choose_strategy
from weft.runtime.launch.world import World
from weft.runtime.loop import instruments
from weft.runtime.loop.between_passes import BetweenPasses
from weft.runtime.loop.data_position import DataPosition
from weft.runtime.loop.data_sharding import Dealer, Shard
from weft.runtime.loop.late_changes import LateChanges
from weft.runtime.loop.logical_workers import Passes
from weft.runtime.loop.model_checks import check_model
from weft.runtime.loop.momentum import check_claims, claimed_momentum, claims
from weft.runtime.loop.partial_step import PartialStep, has_step_hooks, why_not_partial
from weft.runtime.loop.sample_shares import Count
from weft.runtime.modes.all_reduce import Gradients
from weft.runtime.modes.local_steps import Apart
from weft.runtime.modes.parameter_server import Served
from weft.runtime.modes.shared_memory import share
from weft.runtime.record.clock import Clock
from weft.runtime.record.describe import describe, describe_model
from weft.runtime.record.events import Recorder, progress_pipe
from weft.runtime.record.files import write_json
from weft.runtime.record.phases import PhaseTimer
from weft.runtime.server.process import ServerRun
from weft.store.checkpoint import Policy
from weft.strategy import Strategy
from weft.transport.collective import Processes
from weft.transport.heartbeat import seconds

log = logging.getLogger(__name__)


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

    What the command line says (`weft train`) goes before what is said here. `steps` bounds the optimizer steps of
    `run.shard`; `seed` seeds torch, numpy and random. A run with a folder `out` saves itself every `save_every` steps,
    and when it ends; 0: never. `resume` is a checkpoint to go on from.
    """
    global _current, joined
    if _current is not None:
        raise LoopError("weft.init() ran twice; keep the run it returned, or close() it first")
    joined = True
    env = os.environ
    chosen = choose_strategy(strategy)
    world = World.here().with_servers(chosen)
    steps = int(env["WEFT_STEPS"]) if "WEFT_STEPS" in env else steps
    seed = int(env["WEFT_SEED"]) if "WEFT_SEED" in env else seed if seed is not None else 0
    if world.server is not None:
        return cast(Run, ServerRun(world=world, strategy=chosen, steps=steps, seed=seed))
    _current = Run(
        world=world,
        strategy=chosen,
        steps=steps,
        seed=seed,
        device=env.get("WEFT_DEVICE") or device or "auto",
        out=env.get("WEFT_OUT") or out,
        policy=policy_here(save_every),
        resume=env.get("WEFT_RESUME") or resume,
    )
    return _current


_current: Run | None = None
joined = False
"""Whether this process has ever called init."""


def close(*, well: bool = True) -> None:
    """Close the present run, if there is one."""
    if _current is not None:
        _current.close(well=well)


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
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        timeout_s = seconds("WEFT_TIMEOUT_S", 600)
        self._foreign = instruments.foreign()
        self._among_servers = strategy.has_servers and self._foreign is None
        self._shares_memory = strategy.shares_memory and world.workers > 1 and self._foreign is None
        apart = self._among_servers or self._shares_memory  # workers need not know each other
        if not apart:
            world.connect(self.device, timeout_s)
        elif self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        staged = self.device.type == "cuda" and world.shared_gpus
        mesh = world.mesh(timeout_s) if not apart else None
        self._transport = Processes(strategy.topology, world.layout, staged=staged, mesh=mesh)
        self._passes = Passes(world.layout, seed)
        self._clock = Clock(self.device)
        self._recorder = self._record()
        self._phases = PhaseTimer(self._clock, self._recorder)
        self._position = DataPosition()
        self._lifecycle = Lifecycle(
            strategy=strategy,
            steps=steps,
            seed=seed,
            folder=self.folder,
            asked_for=policy,
            resume=Path(resume) if resume else None,
            passes=self._passes,
            position=self._position,
            transport=self._transport,
            phases=self._phases,
            timeout_s=timeout_s,
            settle=self._settle,
        )
        self._gradients: Gradients | None = None
        self._served: Served | None = None
        self._late_changes: LateChanges | None = None
        self._finite = LocalFiniteCheck((), ())
        self._model: nn.Module | None = None
        self._followed = False
        self._report: dict[str, Any] = {}
        self._closed = False
        atexit.register(self._exit)

    # --- where I am -------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The logical worker whose turn it is; its data order and random numbers follow from this number."""
        return self._passes.rank

    @property
    def workers(self) -> int:
        return self.world.workers

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

        `followers` are what steps along and is kept in checkpoints: schedulers, a GradScaler, an average of the
        weights, a torch.Generator; whatever has a state_dict. `unused=True` where parameters may get a gradient in one
        step and none in another. `reduction="sum"` where the loss is a sum over the batch: gradients are then added up
        undivided, and a missing batch adds nothing.
        """
        if self._model is not None:
            raise UserError("run.distribute() ran twice; put several models into one nn.ModuleDict")
        self._model = model
        check_model(model, optimizer, self.device, self._passes)
        self._check_reduction(reduction)
        specs = [Spec(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters() if p.requires_grad]
        if self.folder is not None and self.is_main:
            describe_model(self.folder, specs)
        for instrument in instruments.current():
            instrument.attach(self, model, optimizer)
        if self._foreign is None:
            keep_memory()
            self._transport.spread([*model.parameters(), *model.buffers()])
        ours = not self.world.alone and self._foreign is None
        momentum = claimed_momentum(self.strategy, optimizer) if ours else None
        parts = Parts(
            model=model, optimizer=optimizer, followers=followers, passes=self._passes, position=self._position
        )
        if self._among_servers:
            kind = Apart if self.strategy.has_local_steps else Served
            parts.served = self._served = kind(
                model,
                optimizer,
                strategy=self.strategy,
                passes=self._passes,
                phases=self._phases,
                world=self.world,
                seed=self.seed,
                timeout_s=self._lifecycle.timeout_s,
                unused=unused,
                defers=self._may_defer(model, optimizer),
            )
            self._transport.teller = self._served.tell
            if self.strategy.synchrony.lockstep:
                self._passes.compare = self._compare_batches
            self._phases.engine = self._phases.sender = self._served.client
        known = self._lifecycle.open(parts, specs, self._recorder)
        if self._served is not None:
            self._served.start()
        elif self._shares_memory:
            share(model, optimizer, self._common_folder(), first=self.is_main, timeout_s=self._lifecycle.timeout_s)
            self._finite = LocalFiniteCheck(*zip(*model.named_parameters(), strict=True))
        elif not self.world.alone and self._foreign is None:
            engine = Engine(self.strategy, self._transport, self.device, self.seed)
            engine.clock = self._clock
            engine.momentum = momentum or 0.0
            self._phases.engine, self._phases.sender = engine, self._transport
            self._gradients = Gradients(
                model,
                engine,
                self._passes,
                self._phases,
                unused=unused,
                defers=self._may_defer(model, optimizer),
                folder=self.folder,
                known=known,
            )
            parts.gradients = self._gradients
            self._late_changes = self._gradients.late_changes = LateChanges(
                model, optimizer, followers, hooked=self._gradients.params
            )
            if self._passes.count > 1:
                self._gradients.between_passes = BetweenPasses(model, optimizer, self._gradients.params)
                self._passes.dealing = self._gradients.between_passes.next_pass
            if hasattr(model, "_orig_mod"):
                log.warning("a compiled model hands over its gradients all at once: right, but without overlap")
        elif self._foreign is None:
            named = dict(model.named_parameters())
            self._finite = LocalFiniteCheck(list(named), list(named.values()))
        if self._recorder and not hasattr(model, "_orig_mod"):
            model.register_forward_pre_hook(lambda module, _: self._phases.forward_began() if module.training else None)
            model.register_forward_hook(lambda module, *_: self._phases.forward_ended() if module.training else None)
        self._patch_optimizer(optimizer)
        for follower in followers:
            self._follow(follower)
        self._check_scheduler(optimizer)
        self._passes.part_streams()
        self._lifecycle.opened()
        if self._foreign is not None:
            model, optimizer = self._foreign.wrap(model, optimizer)
        return (model, optimizer, *followers)

    def shard(
        self, loader: Iterable[Any], *, epochs: int | None = 1, own: bool = False, samples: Count | None = None
    ) -> Shard:
        """This worker's batches of `loader`, which every process builds alike.

        Batches are dealt to the workers in turn. `epochs=None` goes round until the run's steps are used up.
        `own=True`: the loader already holds only this worker's data; lengths may differ. `samples` counts a batch where
        its first dimension does not: the loss is a mean over tokens, or the batch is the second dimension. A worker's
        gradient weighs its count over that of all workers; 0 adds nothing.
        """
        if samples is not None and own:
            raise UserError("samples= and own=True cannot go together; leave own=True out, and give one common loader")
        if samples is not None and not self.strategy.synchrony.lockstep:
            raise UserError(
                f"samples= compares the batches of one step, and under {self.strategy.synchrony.name} workers are at "
                "different steps; leave it out, or use bsp"
            )
        dealer = Dealer(
            workers=self.workers,
            passes=self._passes,
            transport=self._transport,
            position=self._position,
            seed=self.seed,
        )
        return Shard(dealer, loader, epochs, own, self._lifecycle, samples)

    def log(self, **values: float | Tensor) -> None:
        """Values of this step for the run folder; tensors are read later, so the device is not held up."""
        kept = {key: v.detach().clone() if isinstance(v, Tensor) else v for key, v in values.items()}
        self._phases.log(kept, self._passes.share)

    # --- what a loop may also need ----------------------------------------------------------------------------------

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
        assert self._model is not None, "run.distribute() comes first"
        if self._served is not None and not self._served.keeps_gradients:
            raise LoopError(
                "run.clip() needs the mean of all gradients, which only the servers have; leave it out there"
            )
        if not self._passes.complete:
            return torch.zeros(())
        return nn.utils.clip_grad_norm_(self._model.parameters(), norm)

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
        try:
            if well:
                self._settle()
            else:
                self._flush()
            self._lifecycle.close(well=well)
            if self._served is not None:
                self._served.close(well=well or self._lifecycle.left)
            if self._recorder:
                self._recorder.close()
            if self._report and self.folder and self.is_main:
                write_json(self.folder / "report.json", self._report)
        finally:
            if self._late_changes is not None:
                self._late_changes.close()
            if self._transport.talk is not None:
                self._transport.talk.close()
            if dist.is_initialized() and not self._stuck:
                dist.destroy_process_group()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _exit(self) -> None:
        self.close(well=getattr(sys, "last_value", None) is None)
        if self._stuck:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    @property
    def _stuck(self) -> bool:
        """Whether the collective library may wait for a peer that fell silent, and cannot be left in order."""
        return self._transport.talk is not None and self._transport.talk.silent is not None

    def _check_reduction(self, reduction: str) -> None:
        if reduction not in ("mean", "sum"):
            raise UserError(f'reduction={reduction!r} is not known; say "mean" or "sum", as the loss function does')
        if reduction == "mean":
            return
        if not self.strategy.synchrony.lockstep:
            raise UserError(
                f'reduction="sum" adds up the gradients of one step, and under {self.strategy.synchrony.name} workers '
                "are at different steps; let the loss be a mean, and leave it out"
            )
        self._passes.add_up()

    def _compare_batches(self, fingerprint: int) -> None:
        check_batches([row[0] for row in self._transport.tell([fingerprint])])

    def _common_folder(self) -> Path:
        """A folder that all workers of this machine see."""
        if not self.world.meeting or self.world.layout.workers > self.world.layout.processes:
            raise UserError(
                "shared_memory takes one machine and a process for each worker; start it with `weft train`, without "
                "--nodes and --processes"
            )
        return Path(self.world.meeting)

    def _record(self) -> Recorder | None:
        tell = progress_pipe() if self.is_main else None
        if self.folder is None and tell is None:
            return None
        trace = os.environ.get("WEFT_TRACE") == "1"
        recorder = Recorder(self.folder, self.world.process, self._clock, tell, trace)
        recorder.about = {"steps": self.steps, "workers": self.world.processes}
        recorder.marks = {int(step) for step in os.environ.get("WEFT_MARKS", "").split(",") if step}
        if self.folder is not None and self.is_main:
            describe(self.folder, self.strategy, self.world, self.device, self.seed, self.steps)
        return recorder

    def _patch_optimizer(self, optimizer: Optimizer) -> None:
        """`step` takes effect when every carried worker's gradient is in; `zero_grad` is noticed."""
        step, zero_grad, passes = optimizer.step, optimizer.zero_grad, self._passes
        partial_step = PartialStep(optimizer)
        claimed = self._gradients is not None and claims(self.strategy)

        def weft_step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if closure is not None and (not self.world.alone or self._served is not None):
                raise LoopError("step(closure) judges by one worker's loss alone; call backward first, then step()")
            if any(each is not None and each.local for each in (self._gradients, self._served)):
                raise LoopError(
                    "step() after a backward inside accumulate() alone; leave the last backward outside of it"
                )
            self._check_scheduler(optimizer)
            if self._late_changes is not None:
                self._late_changes.check_parameters()
            self._check_by_hand()
            passes.asked = True
            if not passes.complete:
                if self._gradients is not None and self._gradients.between_passes is not None:
                    self._gradients.between_passes.hide()
                return None
            if self._served is None:
                self._check_finite(optimizer)
            if claimed:
                check_claims(optimizer)
            if self._served is not None:
                self._served.step()
                self._phases.exchange_ended()
            self._phases.optimizer_began()
            if self._gradients is not None and (self._gradients.deferred.stepping or has_step_hooks(optimizer)):
                self._gradients.flush()  # a second step, or one that somebody wants to see as a whole
            if self._gradients is not None and self._gradients.deferred.under_way:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler asks for it
                self._gradients.deferred.step(partial_step.freeze())
                result = None
            elif self._served is not None:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # the servers' step was this one
                result = None
            else:
                with self._late_changes.stepping() if self._late_changes is not None else contextlib.nullcontext():
                    result = step(closure) if closure is not None else step()
            samples = passes.samples
            passes.stepped()
            self._phases.step_ended(passes.step, samples)
            return result

        def weft_zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
            gradients = self._gradients
            if gradients is not None and gradients.between_passes is not None and gradients.between_passes.between:
                return
            passes.unstepped = False
            if gradients is not None:
                if not (gradients.deferred.stepping and set_to_none):
                    gradients.flush()
                gradients.release()
            if self._served is not None and self._served.clear():
                return
            if gradients is None or not gradients.deferred.clearing:
                zero_grad(set_to_none)

        if hasattr(step, "_wrapped_by_lr_sched"):
            weft_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.register_state_dict_pre_hook(lambda _: self._look())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self._loading())
        # bound methods, as a scheduler that is made later expects them
        optimizer.step = MethodType(weft_step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(weft_zero_grad, optimizer)  # type: ignore[method-assign]

    def _check_finite(self, optimizer: Optimizer) -> None:
        """NaN and infinity stop here; a scaler's fused step looks for itself, and other wrappers do as they do."""
        if getattr(optimizer, "found_inf", None) is not None or self._foreign is not None:
            return
        if self._gradients is not None:
            self._gradients.check()
        else:
            self._finite.check(self.step)

    def _check_by_hand(self) -> None:
        """Where no gradients were exchanged since the last step, there should be none."""
        gradients = self._gradients
        if (
            gradients is None
            or self._passes.unstepped
            or (gradients.between_passes is not None and gradients.between_passes.between)
        ):
            return
        gradients.check_by_hand()

    def _flush(self) -> None:
        if self._gradients is not None:
            self._gradients.flush()
        if self._served is not None:
            self._served.flush()

    def _loading(self) -> None:
        """Somebody gives the optimizer another state."""
        self._flush()
        if self._served is not None and self._served.started:
            raise LoopError(
                "the servers have the optimizer's state, and do not see what is loaded here; load it before "
                "run.distribute(), or resume from a checkpoint of Weft's"
            )

    def _look(self) -> None:
        """Somebody wants to see the optimizer's state."""
        self._flush()
        if self._served is not None and self._passes.step:
            self._served.fetch()

    def _settle(self) -> None:
        """Until the last step is whole; refuses it where a GPU has found values in it that are not finite."""
        self._flush()
        if self._served is not None:
            self._served.refresh()
        if self._gradients is not None:
            self._gradients.look_back()
        else:
            self._finite.look_back(self.step)

    def _may_defer(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Whether parameters can be updated as their gradients arrive; where not, say why."""
        if not self.strategy.schedule.defers or self.strategy.synchrony.eager:  # who does not wait defers nothing
            return False
        why = why_not_partial(model, optimizer)
        if why:
            log.warning("%s, so the next forward waits for the whole update: right, but with less overlap", why)
        return why is None

    def _follow(self, follower: Any) -> None:
        """Schedulers and scalers act only when the optimizer does."""
        if self._passes.count == 1:
            return
        self._followed = self._followed or isinstance(follower, LRScheduler)
        for name in ("step", "update", "unscale_", "update_parameters", "zero_grad"):
            act = getattr(follower, name, None)
            if act is not None:
                setattr(follower, name, self._when_complete(act))

    def _when_complete(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def weft_act(*args: Any, **kwargs: Any) -> Any:
            self._passes.asked = True
            return act(*args, **kwargs) if self._passes.complete else None

        return weft_act

    def _check_scheduler(self, optimizer: Optimizer) -> None:
        if self._passes.count > 1 and hasattr(optimizer.step, "_wrapped_by_lr_sched") and not self._followed:
            raise UserError(
                "a scheduler follows the optimizer, and this process carries several workers; make it first and pass "
                "it along: model, optimizer, scheduler = run.distribute(model, optimizer, scheduler)"
            )
