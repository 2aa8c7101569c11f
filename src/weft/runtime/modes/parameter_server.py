"""A worker among servers: gradients leave as backward finishes them, `step` brings the new model.

Under `priority` the step returns at once, and whoever touches a parameter waits for it (`late`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from weft.errors import LoopError, UserError
from weft.runtime.checks.finite import check_gradient
from weft.runtime.engine.buckets import LOOKED_AT, weigh
from weft.runtime.engine.lazy_parameter import LazyParameter, make_lazy, make_ready
from weft.runtime.launch.world import World
from weft.runtime.loop.buffers import BufferSlots
from weft.runtime.loop.logical_workers import Passes
from weft.runtime.loop.server_owned import ServerOwned
from weft.runtime.record.phases import PhaseTimer
from weft.runtime.server.bundle_state import hyper
from weft.runtime.server.client import PulledModel, ServerClient
from weft.runtime.server.gpu_client import GpuPull, GpuServerClient
from weft.runtime.server.prefetch import Prefetcher
from weft.runtime.server.process import reach, refuse
from weft.runtime.server.protocol import Hyper
from weft.strategy import Strategy


class Served:
    """Hooks on a model's parameters, and what is on its way to servers and back."""

    keeps_gradients: ClassVar[bool] = False
    """Whether `.grad` stays this worker's own until `step`, so that clipping it has an effect."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strategy: Strategy,
        passes: Passes,
        phases: PhaseTimer,
        world: World,
        seed: int,
        timeout_s: float,
        unused: bool,
        defers: bool,
    ) -> None:
        refuse(model, optimizer, world)
        self.optimizer, self.passes, self.phases, self.timeout_s = optimizer, passes, phases, timeout_s
        self.synchrony, self.overlaps, self.defers = strategy.synchrony, strategy.schedule.overlaps, defers
        self.unused, self.asked, self.raw = unused, False, strategy.compression.raw
        self.leaving = False
        """Whether all workers leave after this step."""
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.flat = {name: _flat(name, p) for name, p in self.named.items()}
        self._name_of = {id(p): name for name, p in self.named.items()}
        self._stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.unchanged = ServerOwned(model, self.named, optimizer)
        self._slots = BufferSlots(model, passes.workers)
        self.client: ServerClient | GpuServerClient = reach(
            model, optimizer, strategy=strategy, world=world, rank=passes.rank, seed=seed, timeout_s=timeout_s
        )
        eager = self.synchrony.eager
        self.eager = Prefetcher(self.client, self.synchrony, self.flat, self._slots, timeout_s) if eager else None
        if next(iter(self.flat.values())).is_cuda:
            if eager:
                raise UserError("servers that send by themselves do not reach GPUs yet; use ssp, or --device cpu")
            self.client = GpuServerClient(self.client, self.flat, self.buffers, timeout_s)
        at, self.running = self.client.join(timeout_s)
        if self.running:  # this worker was lost, and is back: it goes on where it was
            passes.step = max(passes.step, at)
        self._apart = len(strategy.server_topology.worker_groups(world.workers)) or world.workers
        """How many go at a pace of their own."""
        self.started = False
        self.came: set[str] = set()
        self._held: dict[str, Tensor | None] = {}
        early = self.overlaps and self.synchrony.lockstep
        self._coming = self.client.room(self.flat) if early else None
        """The next step's parameters, while backward still needs this one's."""
        self._pulled: PulledModel | GpuPull | None = None
        self._cleared = True
        self._numbers: Hyper = []
        self.local = False  # gradients from `accumulate` are waiting

    @property
    def buffers(self) -> list[Tensor]:
        """The model's buffers as they are now."""
        return self._slots.tensors

    def start(self) -> None:
        """Worker 0 brings what training starts from, everyone gets it, and backward is listened to."""
        if self.passes.rank == 0 and not self.running:
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
            raise LoopError(
                "backward ran twice before step(), and the first gradient was taken already; put all but the last "
                "backward into `with run.accumulate():`"
            )
        if type(grad) is Away:
            raise _uncleared()
        if not self.came:
            self._begin()
        self.came.add(name)
        self._take(name, param, grad)

    def _take(self, name: str, param: Tensor, grad: Tensor) -> None:
        """A gradient is there: it leaves, now or in `step`."""
        flat = self._weighed(name, grad)
        given = flat if self.passes.share > 0 or not self.raw else None  # who has no batch has no gradient
        if self.overlaps:
            self.client.push(name, given, self.passes.step, self._coming)
        else:
            self._held[name] = given
        param.grad = Away.of(grad)

    def _weighed(self, name: str, grad: Tensor) -> Tensor:
        """A gradient times this worker's share, flat, and looked at; where that can be, in one pass over memory."""
        if grad.is_sparse or grad.is_cuda or grad.dtype not in LOOKED_AT:
            self._check(name, grad)
            return grad.resolve_conj().reshape(-1).mul_(self.passes.share)
        flat = grad.reshape(-1)
        if not weigh(flat, self.passes.share):
            check_gradient(name, flat, self.passes.step)
        return flat

    def _check(self, name: str, grad: Tensor) -> None:
        if grad.is_sparse:
            raise LoopError(f"the gradient of {name} is sparse at step {self.passes.step + 1}; servers cannot use that")
        if not grad.is_cuda:  # a GPU would be held up; its gradients are looked at on the host
            check_gradient(name, grad, self.passes.step)

    def _begin(self) -> None:
        """The first gradient of a backward."""
        if not self._cleared:
            raise _uncleared()
        self.passes.begin_backward()
        if self.local:
            self.passes.accumulated()
            self.local = False
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        self.flush()
        self.unchanged.check()
        self._announce()

    def _announce(self) -> None:
        """The servers learn what this step's gradients are to be used with."""
        self._numbers = self._hyper()
        kept = self.buffers if self.passes.rank == 0 and self.passes.share > 0 else ()
        if self.eager is not None:
            began = self.phases.clock.stamp()
            self.eager.begin(kept)
            self.phases.held_up(began)
        leave = self.asked and self.synchrony.lockstep
        self.client.begin(self.passes.step, self.passes.share, self._numbers, kept, leave=leave)

    def _hyper(self) -> Hyper:
        """The optimizer's numbers, as the synchrony wants them."""
        numbers = hyper(self.optimizer)
        for group in numbers:
            if isinstance(momentum := group.get("momentum"), float | int):
                group["momentum"] = self.synchrony.momentum(momentum, self._apart)
        return numbers

    def _ended(self) -> None:
        self.passes.next()
        self.phases.backward_ended()

    # --- step -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """A step, with the hooks that the loop has put on the optimizer's."""
        optimizer = self.optimizer
        for hook in [*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]:
            hook(optimizer, (), {})
        self.unchanged.check()
        self._step()
        if self.unchanged.due(self.passes.step):
            self.flush()
        self.unchanged.hash(self.passes.step)
        for hook in [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]:
            hook(optimizer, (), {})

    def _step(self) -> None:
        """The servers step; returns when this worker may go on, or when it may start to, with what has come by then."""
        self._check_gradients()
        for name, p in self.named.items():
            if name not in self.came and p.grad is not None:  # a backward inside accumulate() alone has reached it
                self._take(name, p, p.grad)
            elif name not in self.came:
                self._absent(name)
                self.client.push(name, None, self.passes.step, self._coming)
        for name, grad in self._held.items():
            self.client.push(name, grad, self.passes.step)
        if self._held:
            self.client.pushed(self.timeout_s)  # nothing overlaps
        self._held = {}
        if self._numbers != self._hyper():
            raise LoopError(
                "the optimizer's numbers have changed between backward() and step(), and the servers have stepped with "
                "the old ones; change them (a scheduler's step()) after step()"
            )
        self.came = set()
        if self.eager is not None:
            self.eager.step()
            self.leaving = self.asked
            return
        self._bring(self.buffers)

    def _check_gradients(self) -> None:
        """What has gone to the servers is what they step with."""
        for name in self.came:
            if type(self.named[name].grad) is not Away:
                raise LoopError(
                    f"the gradient of {name} was replaced or removed between backward() and step(), and the servers "
                    "have it already; freeze a parameter with requires_grad_(False) before forward, or use another "
                    "topology, such as direct"
                )

    def _bring(self, buffers: Sequence[Tensor]) -> None:
        """Ask for the model, and wait for it; or have whoever touches a parameter wait."""
        self._pulled = self.client.pull(self.flat, buffers)
        if not self.defers:
            self.flush()
            return
        self._pulled.wait_for_buffers(self.timeout_s)
        self._cleared = False
        for p in self.named.values():
            if id(p) in self._stepped:
                p.grad = None
            make_lazy(p, self._touched)

    def clear(self) -> bool:
        """zero_grad(): returns whether that is done already, without touching what is still to come."""
        self._cleared = True
        return self.defers and self._pulled is not None

    def _absent(self, name: str) -> None:
        if not self.unused:
            raise LoopError(
                f"{name} had no gradient at step {self.passes.step + 1}; if parameters come and go, say "
                "run.distribute(..., unused=True)"
            )

    def _touched(self, param: LazyParameter) -> None:
        assert self._pulled is not None
        began = self.phases.clock.stamp()
        if self._enter(self._name_of[id(param)], self._pulled):
            self.phases.held_up(began)
        make_ready(param)

    def _enter(self, name: str, pulled: PulledModel | GpuPull) -> bool:
        """Wait for a parameter, and put it where it belongs. Returns whether it was not there yet."""
        early = pulled.wait_for(name, self.timeout_s)
        if self._coming is not None:
            self.flat[name].copy_(self._coming[name])
        return early

    def flush(self) -> None:
        """Until the whole model of the last step is there."""
        pulled, self._pulled = self._pulled, None
        if pulled is None:
            return
        for name, p in self.named.items():
            if not self.defers or type(p) is LazyParameter:
                self._enter(name, pulled)
                make_ready(p)
        pulled.wait(self.timeout_s)
        self.leaving = pulled.leaving if self.synchrony.lockstep else self.asked

    def refresh(self) -> None:
        """Until the whole model is there, with this worker's own updates in it."""
        self.flush()
        if self.eager is not None:
            self.eager.refresh()

    # --- around it --------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Have the optimizer's state here, as after a step of its own."""
        self.refresh()
        for name, known in self.client.fetch(self.timeout_s).items():
            if known:
                self.optimizer.state[self.named[name]] = known

    def tell(self, values: Sequence[int]) -> list[list[int]]:
        """Everyone's numbers, by worker; this one's for those who are gone."""
        return [row if row is not None else list(values) for row in self.client.tell(values, self.timeout_s)]

    def close(self, *, well: bool) -> None:
        self.unchanged.unwatch()
        if well:
            self.flush()
            self.client.leave(self.timeout_s)
        else:
            self.client.close()


class Away(Tensor):
    """A gradient that has gone to the servers: whoever touches it would see this worker's share alone."""

    @staticmethod
    def of(grad: Tensor) -> Tensor:
        away: Tensor = grad.as_subclass(Away)
        return away

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise LoopError(
            "a gradient was touched that has gone to the servers, where it becomes part of the mean; clipping and "
            "scaling between backward() and step() are not built for servers yet"
        )


_HARMLESS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_sparse", "grad_fn", "is_leaf")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride}


def _uncleared() -> LoopError:
    return LoopError(
        "backward adds to the gradients of the step before, which the servers have; call optimizer.zero_grad() in "
        "every step"
    )


def _flat(name: str, param: Tensor) -> Tensor:
    if not param.is_contiguous():
        raise UserError(f"{name} does not lie in one piece of memory; call .contiguous() on it before run.distribute()")
    return param.data.view(-1)  # whose changes are not counted as somebody's
