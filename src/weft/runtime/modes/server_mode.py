"""A worker among servers: joins them, pulls the model, and fulfils the contract of a mode. Subclasses push."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.compression import State
from weft.errors import UserError
from weft.runtime.checks.finite import check_gradient
from weft.runtime.checks.replicas import check_batches
from weft.runtime.engine.bucket_layout import SavedLayout
from weft.runtime.loop import refusals
from weft.runtime.loop.buffers import BufferSlots
from weft.runtime.loop.partial_step import may_defer
from weft.runtime.loop.server_owned import ServerOwned
from weft.runtime.loop.step_hooks import step_hooks
from weft.runtime.modes import Mode, RunContext
from weft.runtime.modes.model_pull import ModelPull
from weft.runtime.server.bundle_state import hyper
from weft.runtime.server.client import ServerClient
from weft.runtime.server.gpu_client import GpuServerClient
from weft.runtime.server.prefetch import Prefetcher
from weft.runtime.server.process import reach, refuse
from weft.runtime.server.protocol import Hyper
from weft.runtime.server.pushed_gradient import PushedGradient
from weft.synchrony import Synchrony


class ServerMode(Mode, ABC):
    """A worker that pushes gradients to servers and pulls the model from them."""

    connects: ClassVar[bool] = False
    checkpoint_writers: ClassVar[int | None] = 1

    def __init__(
        self, ctx: RunContext, model: nn.Module, optimizer: Optimizer, followers: Sequence[Any], *, unused: bool
    ) -> None:
        super().__init__(ctx, model, optimizer, followers, unused=unused)
        refuse(model, optimizer, ctx.world)
        strategy, passes, timeout_s = ctx.strategy, ctx.passes, ctx.timeout_s
        self.passes, self.phases, self.timeout_s = passes, ctx.phases, timeout_s
        self.synchrony, self.overlaps = strategy.synchrony, strategy.schedule.overlaps
        self.unused = unused
        self._leaving = False
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.flat = {name: _flat(name, p) for name, p in self.named.items()}
        self.unchanged = ServerOwned(model, self.named, optimizer)
        self._slots = BufferSlots(model, passes.workers)
        self.client: ServerClient | GpuServerClient = reach(
            model, optimizer, strategy=strategy, world=ctx.world, rank=passes.rank, seed=ctx.seed, timeout_s=timeout_s
        )
        eager = self.synchrony.eager
        self.eager = Prefetcher(self.client, self.synchrony, self.flat, self._slots, timeout_s) if eager else None
        if next(iter(self.flat.values())).is_cuda:
            if eager:
                raise UserError("servers that send by themselves do not reach GPUs yet; use ssp, or --device cpu")
            self.client = GpuServerClient(self.client, self.flat, self.buffers, timeout_s)
        at, self._rejoined = self.client.join(timeout_s)
        passes.step = max(passes.step, at) if self._rejoined else passes.step  # the servers have gone on
        self._paces = len(strategy.server_topology.worker_groups(ctx.world.workers)) or ctx.world.workers
        """Number of workers, or groups of them, that advance independently."""
        self.started = False
        self.came: set[str] = set()
        self.pull = ModelPull(
            self.client,
            self.named,
            self.flat,
            self.phases,
            timeout_s,
            stepped={id(p) for group in optimizer.param_groups for p in group["params"]},
            defers=may_defer(strategy, model, optimizer),
            early=self.overlaps and self.synchrony.lockstep,
            received=self._received,
        )
        self._numbers: Hyper = []
        self.local = False  # gradients from `accumulate` wait for a push
        ctx.transport.agree_through(self.tell)
        ctx.phases.observe(self.client, self.client)
        if self.synchrony.lockstep:
            passes.compare = lambda fingerprint: check_batches([row[0] for row in self.tell([fingerprint])])

    @property
    def rejoined(self) -> bool:
        return self._rejoined

    @property
    def leaving(self) -> bool:
        return self._leaving

    @property
    def owns_model(self) -> bool:
        return False

    def check_step(self) -> None:
        if self.local:
            raise refusals.only_accumulated()

    def step(self, update: Callable[[], Any]) -> None:
        """The servers step. Hooks on the optimizer's step run here."""
        with step_hooks(self.optimizer):
            self.unchanged.check()
            self._step()
            if self.unchanged.due(self.passes.step):
                self.flush()
            self.unchanged.hash(self.passes.step)
        self.phases.exchange_ended()
        self.phases.optimizer_began()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler reads it

    def zero_grad(self, clear: Callable[[], None], *, set_to_none: bool) -> None:
        self.passes.unstepped = False
        self._drop_gradients()
        if not self.pull.clear():
            clear()

    def settle(self) -> None:
        self.refresh()

    def fetch_final_model(self) -> None:
        self._synchronize()
        self.tell([])
        if self.eager is None:
            self._fetch_model()
        self.refresh()

    def before_state_dict(self) -> None:
        self.flush()
        if self.passes.step:
            self.fetch()

    def before_load_state_dict(self) -> None:
        self.flush()
        if self.started:
            raise refusals.loaded_after_start()

    @property
    def compressor_states(self) -> Sequence[State]:
        return [self.client.state]

    def restore_compressors(self, states: Sequence[State]) -> None:
        self.client.state = dict(states[0])

    @property
    def buffers(self) -> list[Tensor]:
        """The model's buffers as they are now."""
        return self._slots.tensors

    def attach(self, layout: SavedLayout | None) -> None:
        """Worker 0 uploads the initial model, every worker pulls it, and hooks are registered."""
        if self.passes.rank == 0 and not self.rejoined:
            known = {name: self.optimizer.state.get(p, {}) for name, p in self.named.items()}
            self.client.start(self.flat, known, self.buffers, self.timeout_s)
        self.client.pull(self.flat, self.buffers).wait(self.timeout_s)
        if self.eager is not None:
            self.eager.start()
        self.unchanged.watch()
        self.started = True
        for name, p in self.named.items():
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._arrived(name, p))

    # --- backward ---------------------------------------------------------------------------------------------------

    def _arrived(self, name: str, param: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        if self.passes.accumulating:
            self.passes.accumulated()
            self.local = True
            return
        if name in self.came:
            raise refusals.pushed_twice()
        if type(grad) is PushedGradient:
            raise refusals.uncleared_after_push()
        if not self.came:
            self._begin()
        self.came.add(name)
        self._take(name, param, grad)

    def _check(self, name: str, grad: Tensor) -> None:
        if grad.is_sparse:
            raise refusals.sparse_gradient(name)
        if not grad.is_cuda:  # a GPU would be held up; its gradients are looked at on the host
            check_gradient(name, grad, self.passes.step)

    @abstractmethod
    def _take(self, name: str, param: Tensor, grad: Tensor) -> None:
        """A gradient is complete."""

    @abstractmethod
    def _announce(self) -> None:
        """Just before the first gradient of a step."""

    @abstractmethod
    def _step(self) -> None:
        """Take the step, between the hooks that the loop has registered."""

    @abstractmethod
    def _drop_gradients(self) -> None:
        """The loop clears gradients, whether or not a step has used them."""

    @abstractmethod
    def _received(self, name: str) -> None:
        """The servers' values of a parameter are in its memory."""

    @abstractmethod
    def _fetch_model(self) -> None:
        """Begin to pull the servers' model."""

    @abstractmethod
    def _synchronize(self) -> None:
        """Let the servers have every gradient of this worker, and this worker their model."""

    def _begin(self) -> None:
        """The first gradient of a backward."""
        if not self.pull.cleared:
            raise refusals.uncleared_after_push()
        self.passes.begin_backward()
        if self.local:
            self.passes.accumulated()
            self.local = False
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        self.flush()
        self.unchanged.check()
        self._announce()

    def _hyper(self) -> Hyper:
        return hyper_for(self.optimizer, self.synchrony, self._paces)

    def _ended(self) -> None:
        self.passes.next()
        self.phases.backward_ended()

    # --- the model --------------------------------------------------------------------------------------------------

    def _bring(self, buffers: Sequence[Tensor]) -> None:
        """Pull the model and wait for it; under a deferring schedule the first access to a parameter waits instead."""
        self.pull.begin(buffers)
        if not self.pull.defers:
            self.flush()

    def _absent(self, name: str) -> None:
        if not self.unused:
            raise refusals.unused_parameter(name, self.passes.step)

    def flush(self) -> None:
        """Wait for the whole model of the last step."""
        pulled = self.pull.finish()
        if pulled is not None:
            self._leaving = pulled.leaving if self.synchrony.lockstep else self.termination_requested

    def refresh(self) -> None:
        """Wait for the whole model, this worker's own updates included."""
        self.flush()
        if self.eager is not None:
            self.eager.refresh()

    def fetch(self) -> None:
        """Have the optimizer's state here, as after a step of its own."""
        self._synchronize()
        self.refresh()
        for name, known in self.client.fetch(self.timeout_s).items():
            if known:
                self.optimizer.state[self.named[name]] = known

    def tell(self, values: Sequence[int]) -> list[list[int]]:
        """The numbers of all workers, by rank; this worker's own in place of a lost worker's."""
        return [row if row is not None else list(values) for row in self.client.tell(values, self.timeout_s)]

    def close(self, *, well: bool) -> None:
        if well:
            self._synchronize()
        self.unchanged.unwatch()
        if well:
            self.flush()
            self.client.leave(self.timeout_s)
        else:
            self.client.close()


def hyper_for(optimizer: Optimizer, synchrony: Synchrony, paces: int) -> Hyper:
    """The optimizer's numbers, as the synchrony wants them."""
    numbers = hyper(optimizer)
    for group in numbers:
        if isinstance(momentum := group.get("momentum"), float | int):
            group["momentum"] = synchrony.momentum(momentum, paces)
    return numbers


def _flat(name: str, param: Tensor) -> Tensor:
    if not param.is_contiguous():
        raise UserError(f"{name} does not lie in one piece of memory; call .contiguous() on it before run.distribute()")
    return param.data.view(-1)  # whose changes are not counted as somebody's
