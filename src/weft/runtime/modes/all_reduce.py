"""Gradients in the buckets' memory: hooks hand them over, the engine replaces them by the mean.

A hook runs when autograd has finished a parameter. It hands the gradient to its bucket. A full bucket's gradients are
weighed by the worker's share of the batch, in one pass into the bucket's memory, and the bucket goes to the engine. On
a GPU the engine makes that pass, on its own stream. A parameter with a bucket to itself stays where autograd put it.
When backward ends, `.grad` is a view of the bucket and holds the mean: whatever looks at gradients between `backward`
and `step` sees reduced ones.

A schedule may defer: backward then returns while means are on their way (`deferred`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from weft.errors import LoopError
from weft.ops import Spec
from weft.profile import Measured
from weft.runtime.checks.step_status import StepStatus
from weft.runtime.engine.buckets import BucketMemory
from weft.runtime.engine.calibration import Calibration
from weft.runtime.engine.deferred_step import Deferred
from weft.runtime.engine.engine import Engine
from weft.runtime.engine.lazy_parameter import LazyParameter
from weft.runtime.engine.linear_factors import Factors
from weft.runtime.loop.between_passes import BetweenPasses
from weft.runtime.loop.buffers import Buffers
from weft.runtime.loop.late_changes import LateChanges, compiled
from weft.runtime.loop.logical_workers import Passes
from weft.runtime.record.phases import PhaseTimer
from weft.strategy import wrapped


@dataclass(frozen=True)
class ResumedLayout:
    """What an earlier part of the run knew: in which order backward finishes parameters, and what a schedule saw."""

    order: Sequence[str]
    seen: Measured | None


class Gradients:
    """The trainable parameters of one model and the memory their gradients live in."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        passes: Passes,
        phases: PhaseTimer,
        *,
        unused: bool,
        defers: bool = False,
        folder: Path | None = None,
        known: ResumedLayout | None = None,
    ) -> None:
        named = {p: name.removeprefix("_orig_mod.") for name, p in model.named_parameters()}
        self.params = [p for p in named if p.requires_grad]
        self.names = [named[p] for p in self.params]
        self.frozen = [(name, p) for p, name in named.items() if not p.requires_grad]
        self.engine, self.passes, self.phases = engine, passes, phases
        self.buffers = Buffers(model, passes.workers)
        self.unused: bool | None = unused or None  # None: the first step will tell
        self.order: list[int] = []
        self.in_backward = False
        self.fresh = False
        """Whether means have arrived since `zero_grad`."""
        self.late_changes: LateChanges | None = None
        self.between_passes: BetweenPasses | None = None
        self.local = False  # gradients that nobody else has seen are waiting, from `accumulate`
        self.defers = defers
        self.deferred = Deferred(engine, phases)
        self.calibration = (
            Calibration(engine.transport, engine.clock, self.names, folder) if engine.schedule.learns else None
        )
        self.status = engine.status = StepStatus(
            self.names, self.params, lossless=engine.compression.lossless and not passes.sums
        )
        self.seen: Measured | None = None
        wanted = any(layer.factors for layer in wrapped(engine.compression))
        self.factors = Factors(model, self.params) if wanted else None
        self._start_out(known)
        for index, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(lambda p, index=index: self._arrived(index, p))

    # --- memory -----------------------------------------------------------------------------------------------------

    def _start_out(self, known: ResumedLayout | None) -> None:
        """The last parameter first, unless an earlier part of the run has seen more."""
        names: Sequence[str] = list(reversed(self.names))
        seen = None
        if known is not None:
            names, seen = known.order, known.seen if self.calibration else None
        if self.calibration and seen is None and (seen := self.calibration.recall()):
            names = list(seen.ready_s)
        self.replayed = known is not None or seen is not None
        if seen is not None:
            self.calibration = None
        index = {name: i for i, name in enumerate(self.names)}
        self._lay_out([index[name] for name in names], seen)

    def _lay_out(self, order: Sequence[int], seen: Measured | None = None) -> None:
        """Buckets in the order in which backward finishes parameters; one set of memory per carried worker."""
        self.seen = seen
        specs = [Spec(self.names[i], tuple(self.params[i].shape), self.params[i].dtype) for i in order]
        self.engine.timetable = self.engine.plan(specs, seen)
        self.finished = list(order)
        index = {name: i for i, name in enumerate(self.names)}
        self.members = [[index[spec.name] for spec in group] for group in self.engine.timetable.buckets]
        self.bucket_of = {i: b for b, members in enumerate(self.members) for i in members}
        self.memory = [
            BucketMemory(self.engine.timetable, self.members, self.params, leads=pass_index == self.passes.count - 1)
            for pass_index in range(self.passes.count)
        ]

    def _rearrange(self) -> None:
        """After the first step: buckets in the order that process 0 saw, for every process alike."""
        order = self.engine.transport.tell(list(dict.fromkeys(self.order)))[0]
        if order != self.finished:
            self._move(order)

    def _move(self, order: Sequence[int], seen: Measured | None = None) -> None:
        """Lay buckets out anew, between steps, and take gradients along."""
        self._lay_out(order, seen)
        for i, param in enumerate(self.params):
            if param.grad is not None:
                self.memory[-1].put(i, param.grad, 1.0)
        self._fill()

    def _fill(self) -> None:
        """Everything that waits goes into its bucket now."""
        for bucket in range(len(self.members)):
            self.memory[self.passes.pass_index].fill(bucket)

    def release(self) -> None:
        """The gradients were cleared; those of carried workers that wait for the last turn are not meant."""
        self.local = self.fresh = False
        if self.deferred.stepping:
            self.deferred.clear()
        elif self.passes.pass_index == 0 and not self.in_backward:
            for memory in self.memory:
                memory.release()

    def flush(self) -> None:
        """Wait for whatever is deferred."""
        cleared = self.deferred.clearing
        self.deferred.flush()
        if cleared:
            for memory in self.memory:
                memory.release()

    def check(self) -> None:
        """Just before an update: refuse values that are not finite."""
        self.status.check()
        if not self.deferred.under_way:
            self.status.shield([self.memory[-1].contents(bucket) for bucket in range(len(self.members))])

    def look_back(self) -> None:
        """Whatever a GPU has found in the last step, before anybody relies on it; all processes call this together."""
        if self.status.has_unread:
            self.status.begin(self.passes.step)
            self.status.judge(self.engine.transport.tell(self.status.message()))
            self.status.check()

    def compare_steps(self) -> None:
        """A pass over data is over, in all processes, after the same number of steps; they call this together."""
        self.flush()
        words = self.status.last_message(self.passes.step)
        self.status.judge(self.engine.transport.tell_later(lambda: words).heard())

    # --- hooks ------------------------------------------------------------------------------------------------------

    def _arrived(self, index: int, param: Tensor) -> None:
        self._check_late(index, param)
        grad = param.grad
        assert grad is not None
        if grad.is_sparse:
            raise LoopError(
                f"{self.names[index]} has a sparse gradient, which no bucket holds; build its layer with sparse=False"
            )
        if grad.requires_grad:
            raise LoopError(
                "backward(create_graph=True) cannot be distributed; use torch.autograd.grad for the inner one"
            )
        if not self.in_backward:
            self.flush()
            if not self.local:
                self._check_start(index)
        if self.passes.accumulating:
            self.passes.accumulated()
            self.local = True
            return
        if not self.in_backward:
            self._begin()
        self.here.add(index)
        if self.calibration:
            self.calibration.arrived(index)
        self._put(index, grad)

    def _check_late(self, index: int, param: Tensor) -> None:
        """A parameter that has a gradient was used. If it is still late, nobody has waited for its update."""
        if self.between_passes is not None and self.between_passes.between:
            self.between_passes.next_pass()  # a worker without a batch, which `passes` refuses
        elif type(param) is LazyParameter:
            raise LoopError(
                f"{self.names[index]} has a new gradient while its last one is still on its way: backward ran twice "
                f"before step(), or torch.func did not wait; under {self.engine.schedule.name} put all but the last "
                "backward into `with run.accumulate():`, or use the schedule fused"
            )

    def check_by_hand(self) -> None:
        """Just before an update that no exchange has preceded: refuse gradients that were never exchanged."""
        self.flush()
        for i, param in enumerate(self.params):
            grad = param.grad
            if grad is not None and not (self.fresh and self.memory[-1].holds(i, grad)) and grad.any():
                raise LoopError(
                    f"step() without a backward, and {self.names[i]} has a gradient: it was set by hand, and the other "
                    "workers do not know it; call loss.backward(), which exchanges gradients"
                )

    def _check_start(self, index: int) -> None:
        """What is left in `.grad` when the first of several carried workers starts would count for that one alone."""
        if self.passes.count == 1 or self.passes.pass_index:
            return
        if any(p.grad is not None and p.grad.any() for i, p in enumerate(self.params) if i != index):
            raise LoopError(
                "gradients of an earlier step are still there, and this process carries several workers; "
                "call optimizer.zero_grad() in every step"
            )

    def _put(self, index: int, grad: Tensor) -> None:
        """Weigh a gradient into the bucket of the worker whose turn it is."""
        memory, share = self.memory[self.passes.pass_index], self.passes.share
        if self.passes.unstepped and memory.holds(index, grad) and not self.engine.compression.lossless:
            raise LoopError(
                f"backward ran twice before step() under {self.engine.compression.name}, which would send the first "
                "gradient again; put all but the last backward into `with run.accumulate():`"
            )
        if self.factors is not None and (found := self.factors.take(index, share)) is not None:
            memory.factors[index] = found
        memory.put(index, grad, share)
        if not self.passes.last:
            self.params[index].grad = None
        if share > 0.0:
            self.passes.used.add(index)
        self._count(index)

    def _begin(self) -> None:
        """The first gradient of a backward: the exchange starts with the last carried worker's turn."""
        self.passes.begin_backward()
        if self.local:
            self.passes.accumulated()
        if self.late_changes is not None:
            self.late_changes.check_parameters()
            self.late_changes.check_hooks()
            self.late_changes.in_backward = True
        self.in_backward = True
        self.here: set[int] = set()
        self.missing = [len(members) for members in self.members]
        if self.passes.last:
            self.engine.begin(self.memory, self.passes.step)
            self.status.batches = self.passes.fingerprint
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _count(self, index: int) -> None:
        self.order.append(index)
        bucket = self.bucket_of[index]
        self.missing[bucket] -= 1
        if self.missing[bucket] > 0:
            return
        if self.engine.stream is None:
            self.memory[self.passes.pass_index].fill(bucket)
        if self.passes.last:
            self.engine.ready(bucket)

    def _ended(self) -> None:
        """The end of a backward: what got no gradient adds nothing; on the last turn, wait for the means."""
        self.in_backward = False
        if self.late_changes is not None:
            self.late_changes.in_backward = False
        self.local = False
        self.phases.backward_ended()
        for i in range(len(self.params)):
            if i not in self.here:
                self._stay(i)
        self.buffers.pass_ended(self.passes)
        if not self.passes.last:
            self._fill()
        else:
            defer = self.defers and self.unused is False and self.calibration is None and not compiled()
            if not defer:
                self.engine.finish()
            self.engine.spread(self.buffers.tensors)
            self.buffers.settled()
            self._check_frozen()
            if defer:
                self.deferred.begin([[self.params[i] for i in members] for members in self.members])
            else:
                self._settle()
            if not defer:
                self.status.mark()
            self.order = []
            self.passes.used = set()
            self.passes.exchanged()
            self.fresh = True
        self.phases.exchange_ended()
        if self.between_passes is not None and not self.passes.last:
            self.between_passes.pass_ended()
        self.passes.next()

    def _stay(self, index: int) -> None:
        """A parameter that this backward did not reach keeps what it has had since zero_grad, or adds nothing."""
        grad = self.params[index].grad
        if grad is not None:
            self._put(index, grad)
        elif self.unused is False:
            raise LoopError(
                f"{self.names[index]} had no gradient at step {self.passes.step + 1}, though all had one at first; "
                "pass unused=True to run.distribute() where parameters come and go"
            )
        else:
            self.memory[self.passes.pass_index].zero(index)
            self._count(index)

    def _settle(self) -> None:
        """`.grad` as one process would have it: the mean, or None for what nobody used."""
        if self.unused is not False:
            rows = self.engine.transport.tell([int(i in self.passes.used) for i in range(len(self.params))])
            used = [any(flags) for flags in zip(*rows, strict=True)]
            if self.unused is None:
                self.unused = not all(used)
            for i, param in enumerate(self.params):
                param.grad = self.memory[-1].view(i) if used[i] else None
        if self.passes.step == 0 and len(self.members) > 1 and not self.replayed:
            self._rearrange()
        if self.calibration and self.calibration.step_ended():
            seen = self.calibration.learn(self.finished, self.engine.device)
            self.calibration = None
            self._move(self.finished, seen)

    def _check_frozen(self) -> None:
        for name, param in self.frozen:
            if param.requires_grad and param.grad is not None:
                raise LoopError(f"{name} was frozen at run.distribute() and trains now; unfreeze it before that call")
