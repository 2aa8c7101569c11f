"""Every worker steps a copy of the model with its own optimizer, and copies are merged by a collective now and then.

No gradient is exchanged. At a merge, each worker's difference from the anchor goes through the engine as a gradient
does, beside the following steps for as long as the optimization allows; the mean difference moves the anchor, and each
worker adopts it. Anchors are equal on all workers, copies are not.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.compression import State
from weft.optimization import ModelMerging
from weft.optimization import State as MergeState
from weft.runtime.checks.finite import LocalFiniteCheck
from weft.runtime.checks.step_status import StepStatus
from weft.runtime.engine.bucket_layout import SavedLayout
from weft.runtime.engine.engine import Engine
from weft.runtime.engine.fragment_exchange import FragmentExchange, squared_norm
from weft.runtime.loop import refusals
from weft.runtime.loop.late_changes import LateChanges
from weft.runtime.loop.merged_buffers import merged_buffers
from weft.runtime.loop.model_checks import check_local
from weft.runtime.loop.partial_step import has_scaler
from weft.runtime.loop.sample_counts import SampleCounts
from weft.runtime.loop.worker_copies import WorkerCopies
from weft.runtime.modes import Mode, RunContext


@dataclass
class Pending:
    """A merge that was sent, and whose result is not used yet."""

    fragment: int
    finish_step: int
    distance: float = 0.0
    """The workers' mean squared distance from the anchor when it was sent; known when the result has arrived."""


@final
class Merging(Mode):
    """Local optimizers, and merges of their models."""

    steps_each_pass = True

    def __init__(
        self, ctx: RunContext, model: nn.Module, optimizer: Optimizer, followers: Sequence[Any], *, unused: bool
    ) -> None:
        super().__init__(ctx, model, optimizer, followers, unused=unused)
        assert isinstance(ctx.strategy.optimization, ModelMerging)
        self.optimization, self.passes, self.phases = ctx.strategy.optimization, ctx.passes, ctx.phases
        check_local(followers, self.passes)
        named = {p: name.removeprefix("_orig_mod.") for name, p in model.named_parameters()}
        self.params = [p for p in named if p.requires_grad]
        self.names = [named[p] for p in self.params]
        self._frozen = [(name, p) for p, name in named.items() if not p.requires_grad]
        self.anchors = [p.detach().clone() for p in self.params]
        self.status = StepStatus(self.names, self.anchors, lossless=False, noun="change")
        engine = Engine(ctx.strategy, ctx.transport, ctx.device, ctx.seed, clock=ctx.clock, status=self.status)
        count = self.optimization.num_fragments
        self.engine, self.exchange = engine, FragmentExchange(engine, self.names, self.anchors, self.passes, count)
        ctx.phases.observe(self.exchange, ctx.transport)
        self._finite = LocalFiniteCheck(self.names, self.params)
        self._late_changes = LateChanges(model, optimizer, followers)
        self._counts = self.passes.sample_counts = SampleCounts(self.passes.count, count, 1 / self.passes.workers)
        self.merge_states: list[MergeState] = [{} for _ in self.params]
        self.pending: list[Pending] = []
        self._in_flight: Pending | None = None
        self._merged_at = [0] * count
        """By fragment: the number of steps taken when it was last sent."""
        self._finished_at = 0
        self._leaving = self._in_backward = False
        self._batches = 0
        """A fingerprint of the batches of all workers since the last merge."""

    def attach(self, layout: SavedLayout | None) -> None:
        for anchor, p in zip(self.anchors, self.params, strict=True):
            anchor.copy_(p.detach())  # as a checkpoint has restored it
        self.copies = WorkerCopies(self.model, self.optimizer, self.params, self.passes.count)
        self.anchor_buffers = [buffer.clone() for buffer in self.copies.buffers]
        if self.passes.count > 1:
            self.passes.before_batch = lambda: self.copies.show(self.passes.pass_index)
        for param in self.params:
            param.register_post_accumulate_grad_hook(self._arrived)

    # --- backward and step ------------------------------------------------------------------------------------------

    def _arrived(self, param: Tensor) -> None:
        """Autograd has finished a parameter. Its gradient stays where it is."""
        if self.passes.accumulating:
            self.passes.within = True
        elif not self._in_backward:
            self.passes.begin_backward()
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        """The end of a backward, and of a worker's pass."""
        self._in_backward = False
        self.phases.backward_ended()
        last = self.passes.last
        if last and self.passes.fingerprint:
            self._batches = (self._batches * 31 + self.passes.fingerprint) % 2**62
        self.passes.next()
        if last:
            self.passes.exchanged()

    @property
    def accepts_closure(self) -> bool:
        return self.passes.count == 1

    def check_step(self) -> None:
        if self.passes.within:
            raise refusals.only_accumulated()
        if self.passes.count > 1 and self.passes.step_called:
            raise refusals.stepped_without_backward()
        self._late_changes.check_parameters()
        for name, param in self._frozen:
            if param.requires_grad and param.grad is not None:
                raise refusals.unfrozen(name)

    def pass_stepped(self, update: Callable[[], Any]) -> Any:
        return self._own_step(update)

    def step(self, update: Callable[[], Any]) -> Any:
        result = self._own_step(update)
        with torch.no_grad():
            self._merge(self.passes.step)
        return result

    def _own_step(self, update: Callable[[], Any]) -> Any:
        if not has_scaler(self.optimizer):
            self._finite.check(self.passes.step, f" on worker {self.passes.ranks[self.copies.shown]}")
        self.phases.optimizer_began()
        with self._late_changes.stepping():
            return update()

    # --- merges -----------------------------------------------------------------------------------------------------

    def _merge(self, step: int) -> None:
        """Use the results that are due after this step, and send the fragments that are due."""
        began, stamp = time.perf_counter(), self.ctx.clock.stamp()
        used = self._use(step)
        due = self.optimization.due(step)
        for merge in due:
            self._send(merge.fragment, merge.finish_step, step)
            used += self._use(step)
        if due or used:
            self.phases.held_up_by_merge(stamp)
            seconds = time.perf_counter() - began
            self.phases.log({"merges": len(used), "merge_s": seconds} | ({"consensus": max(used)} if used else {}), 1.0)

    def _send(self, fragment: int, finish_step: int, step: int) -> None:
        """Start to sum the workers' differences of a fragment."""
        self._arrive()
        shares, inside = self._counts.reset(fragment), self.exchange.members[fragment]
        squares = [
            share * squared_norm([self._difference(number, index) for index in inside])
            for number, share in enumerate(shares)
        ]
        self.status.figures = [_bits(sum(squares))]
        self.exchange.begin(fragment, self._difference, shares, step=step, batches=self._batches)
        self._in_flight = Pending(fragment, finish_step)
        self.pending.append(self._in_flight)
        self._merged_at[fragment], self._batches = step + 1, 0
        if fragment == self.optimization.num_fragments - 1:
            self._merge_buffers(shares)

    def _difference(self, pass_index: int, index: int) -> Tensor:
        return self.anchors[index] - self.copies.all[pass_index].params[index]

    def _merge_buffers(self, shares: Sequence[float]) -> None:
        self.copies.keep()
        mine = [each.buffers for each in self.copies.all]
        self.anchor_buffers = merged_buffers(self.ctx.transport, self.anchor_buffers, mine, shares)
        self.copies.set_buffers(self.anchor_buffers)

    def _arrive(self) -> None:
        """Wait for the exchange in flight, and read the messages that came with it."""
        if self._in_flight is None:
            return
        self.exchange.arrive()
        self.status.check()
        self._leaving = self.status.leave_next
        self._in_flight.distance = sum(_double(row[0]) for row in self.status.figures_of)
        self._in_flight = None

    def _use(self, step: int) -> list[float]:
        """Use the results that are due after a step. Returns the consensus of each."""
        due = [each for each in self.pending if each.finish_step <= step]
        for pending in due:
            if pending is self._in_flight:
                self._arrive()
            self.pending.remove(pending)
        return [self._adopt(pending) for pending in due]

    def _adopt(self, pending: Pending) -> float:
        """Move the anchor of a fragment, and let every worker of this process adopt it. Returns the consensus."""
        inside, workers = self.exchange.members[pending.fragment], self.passes.workers
        means = [self.exchange.mean(pending.fragment, index) for index in inside]
        norm = squared_norm([self.anchors[index] for index in inside])
        apart = max(0.0, pending.distance - squared_norm(means))
        for index, mean in zip(inside, means, strict=True):
            before = self.anchors[index]
            after, state = self.optimization.merge(before, mean, self.merge_states[index], workers)
            for each in self.copies.all:
                own = each.params[index]
                own.copy_(self.optimization.adopt(own, before, after, workers))
            self.merge_states[index] = state
            before.copy_(after)
        self.exchange.release(pending.fragment)
        return math.sqrt(apart / norm) if norm else 0.0

    # --- around a step ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self._finite.look_back(self.passes.step)
        self._arrive()

    def finish(self) -> bool:
        """A last merge of every fragment that was not sent after the last step. Every worker then has the anchor."""
        step = self.passes.step
        if self._finished_at == step:
            return False
        self._finished_at = step
        with torch.no_grad():
            self._use(max((each.finish_step for each in self.pending), default=0))
            for fragment, sent in enumerate(self._merged_at):
                if sent < step:
                    self._send(fragment, step, step)
                    self._use(step)
            for each in self.copies.all:
                for own, anchor in zip(each.params, self.anchors, strict=True):
                    own.copy_(anchor)
        return True

    @contextmanager
    def merged(self) -> Iterator[None]:
        with self.copies.replaced(self.anchors, self.anchor_buffers):
            yield

    def epoch_ended(self) -> None:
        self.settle()
        words = self.status.last_message(self.passes.step)
        self.status.judge(self.ctx.transport.tell(words))

    @property
    def leaving(self) -> bool:
        return self._leaving

    def request_termination(self) -> None:
        self.status.termination_requested = True

    def detach(self) -> None:
        self._late_changes.close()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def compressor_states(self) -> Sequence[State]:
        return self.engine.states

    def restore_compressors(self, states: Sequence[State]) -> None:
        self.engine.restore(states)

    def optimizer_state(self) -> dict[str, Any]:
        """Its options. Each worker has a state of its own."""
        return {**self.optimizer.state_dict(), "state": {}}

    def shared_state(self) -> dict[str, Any]:
        pending = [
            {
                "fragment": each.fragment,
                "finish_step": each.finish_step,
                "distance": each.distance,
                "means": [self.exchange.mean(each.fragment, i) for i in self.exchange.members[each.fragment]],
            }
            for each in self.pending
        ]
        states = dict(zip(self.names, self.merge_states, strict=True))
        return {"merges": states, "pending": pending, "merged_at": self._merged_at, "batches": self._batches}

    def worker_state(self, pass_index: int) -> dict[str, Any]:
        own = self.copies.all[pass_index]
        return {
            "copy": dict(zip(self.names, own.params, strict=True)),
            "buffers": list(own.buffers),
            "optimizer": self.copies.optimizer_state(pass_index),
            "samples": self._counts.state(pass_index),
        }

    def restore(self, shared: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> None:
        self.merge_states = [dict(shared["merges"][name]) for name in self.names]
        self._merged_at, self._batches = list(shared["merged_at"]), shared["batches"]
        self.pending = []
        for each in shared["pending"]:
            self.exchange.load(each["fragment"], each["means"])
            self.pending.append(Pending(each["fragment"], each["finish_step"], each["distance"]))
        for pass_index, own in enumerate(workers):
            copy = [own["copy"][name] for name in self.names]
            self.copies.load(pass_index, copy, own["buffers"], own["optimizer"])
            self._counts.load(pass_index, own["samples"])


def _bits(value: float) -> int:
    """A float as the integer of the same bits."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def _double(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])
