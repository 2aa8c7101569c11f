"""The anchor, the workers' copies of the model, and the merges between them.

A merge sends one fragment: each worker's difference from the anchor, weighted by its share of the samples, is summed by
the engine beside the following steps. After the step for which its result is due, the mean difference moves the anchor,
and every worker adopts it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from weft.optimization import ModelMerging, State
from weft.runtime.checks.step_status import StepStatus
from weft.runtime.engine.engine import Engine
from weft.runtime.engine.fragment_exchange import FragmentExchange, squared_norm
from weft.runtime.loop.merged_buffers import merged_buffers
from weft.runtime.loop.sample_counts import SampleCounts
from weft.runtime.loop.worker_copies import WorkerCopies
from weft.runtime.modes import RunContext


@dataclass
class Pending:
    """A merge that was sent, and whose result is not used yet."""

    fragment: int
    finish_step: int
    distance: float = 0.0
    """The workers' mean squared distance from the anchor when it was sent; known when the result has arrived."""


class ModelMerges:
    """The merges of one process's workers."""

    def __init__(
        self, ctx: RunContext, optimization: ModelMerging, names: Sequence[str], params: Sequence[nn.Parameter]
    ) -> None:
        self.optimization, self.transport, self.passes = optimization, ctx.transport, ctx.passes
        self.names, self.params = names, params
        self.anchors = [p.detach().clone() for p in params]
        self.status = StepStatus(names, self.anchors, lossless=False, noun="change")
        self.status.figures = [_bits(0.0)]
        self.engine = Engine(ctx.strategy, ctx.transport, ctx.device, ctx.seed, clock=ctx.clock, status=self.status)
        count = optimization.num_fragments
        self.exchange = FragmentExchange(self.engine, names, self.anchors, ctx.passes, count)
        self._counts = ctx.passes.sample_counts = SampleCounts(ctx.passes.count, count, ctx.passes.workers)
        self._states: list[State] = [{} for _ in params]
        self._pending: list[Pending] = []
        self._in_flight: Pending | None = None
        self._sent_at = [0] * count
        """By fragment: the number of steps taken when it was last sent."""
        self._finished_at = 0
        self._begun = False
        self.leaving = False
        """Whether any process has requested to terminate before the last merge: all of them know."""
        self.batches = 0
        """A fingerprint of the batches of all workers since the last merge."""

    def start(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Every copy starts from the model, which is the anchor."""
        for anchor, p in zip(self.anchors, self.params, strict=True):
            anchor.copy_(p.detach())
        self.copies = WorkerCopies(model, optimizer, self.params, self.passes.count)
        self.anchor_buffers = [buffer.clone() for buffer in self.copies.buffers]

    @torch.no_grad()
    def begin(self, *, forward: bool) -> None:
        """Before the first step: the loop may have loaded weights into the model since it was distributed.

        `forward`: it has run already, and has changed buffers.
        """
        if self._begun:
            return
        self._begun = True
        for i, p in enumerate(self.params):
            for own in (self.anchors, *(each.params for each in self.copies.all[1:])):
                own[i].copy_(p)
        if not forward:
            self.anchor_buffers = [buffer.clone() for buffer in self.copies.buffers]
            self.copies.set_buffers(self.anchor_buffers)

    # --- between steps ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def merge(self, step: int) -> dict[str, float]:
        """Use the results that are due after this step, and send the fragments that are due; figures for the record."""
        self.copies.keep()
        consensus = self._use(step)
        due = self.optimization.due(step)
        for merge in due:
            self._send(merge.fragment, merge.finish_step, step)
            consensus += self._use(step)
        if not (due or consensus):
            return {}
        return {"merges": len(consensus)} | ({"consensus": max(consensus)} if consensus else {})

    @torch.no_grad()
    def finish(self) -> bool:
        """A last merge of every fragment that was not sent after the last step. Every worker then has the anchor."""
        taken = self.passes.step
        if self._finished_at == taken:
            return False
        self._finished_at, last = taken, taken - 1
        self.copies.keep()
        self._use(max((each.finish_step for each in self._pending), default=0))
        for fragment, sent in enumerate(self._sent_at):
            if sent < taken:
                self._send(fragment, last, last)
                self._use(last)
        for each in self.copies.all:
            for own, anchor in zip(each.params, self.anchors, strict=True):
                own.copy_(anchor)
        return True

    def merged(self) -> AbstractContextManager[None]:
        """The model holds the anchor meanwhile."""
        if not self._begun:
            return nullcontext()
        return self.copies.replaced(self.anchors, self.anchor_buffers)

    def _send(self, fragment: int, finish_step: int, step: int) -> None:
        """Start to sum the workers' differences of a fragment."""
        self.arrive()
        shares, inside = self._counts.reset(fragment), self.exchange.members[fragment]
        differences = [[self.anchors[index] - own.params[index] for index in inside] for own in self.copies.all]
        squares = [share * squared_norm(mine) for share, mine in zip(shares, differences, strict=True)]
        self.status.figures = [_bits(sum(squares))]
        self.exchange.begin(fragment, differences, shares, step=step, batches=self.batches)
        self._in_flight = Pending(fragment, finish_step)
        self._pending.append(self._in_flight)
        self._sent_at[fragment], self.batches = step + 1, 0
        if fragment == self.optimization.num_fragments - 1:
            self._merge_buffers(shares)

    def _merge_buffers(self, shares: Sequence[float]) -> None:
        mine = [each.buffers for each in self.copies.all]
        self.anchor_buffers = merged_buffers(self.transport, self.anchor_buffers, mine, shares)
        self.copies.set_buffers(self.anchor_buffers)

    def arrive(self) -> None:
        """Wait for the exchange in flight, and read the messages that came with it."""
        if self._in_flight is None:
            return
        self.exchange.arrive()
        self.status.check()
        self.leaving = self.status.leave_next
        self._in_flight.distance = sum(_double(row[0]) for row in self.status.figures_of)
        self._in_flight = None

    def _use(self, step: int) -> list[float]:
        """Use the results that are due after a step. Returns the consensus of each."""
        due = [each for each in self._pending if each.finish_step <= step]
        for pending in due:
            if pending is self._in_flight:
                self.arrive()
            self._pending.remove(pending)
        return [self._adopt(pending) for pending in due]

    def _adopt(self, pending: Pending) -> float:
        """Move the anchor of a fragment, and let every worker of this process adopt it. Returns the consensus.

        That is the distance of the copies from their mean, as a root mean square relative to the anchor's norm.
        """
        inside, workers = self.exchange.members[pending.fragment], self.passes.workers
        means = [self.exchange.mean(pending.fragment, index) for index in inside]
        norm = squared_norm([self.anchors[index] for index in inside])
        apart = max(0.0, pending.distance - squared_norm(means))
        for index, mean in zip(inside, means, strict=True):
            before = self.anchors[index]
            after, state = self.optimization.merge(before, mean, self._states[index], workers)
            for each in self.copies.all:
                own = each.params[index]
                own.copy_(self.optimization.adopt(own, before, after, workers))
            self._states[index] = state
            before.copy_(after)
        self.exchange.release(pending.fragment)
        return math.sqrt(apart / norm) if norm else 0.0

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any]:
        """The state that is equal in all processes."""
        pending = [
            {
                "fragment": each.fragment,
                "finish_step": each.finish_step,
                "distance": each.distance,
                "means": [self.exchange.mean(each.fragment, i) for i in self.exchange.members[each.fragment]],
            }
            for each in self._pending
        ]
        states = dict(zip(self.names, self._states, strict=True))
        return {"merges": states, "pending": pending, "sent_at": self._sent_at, "batches": self.batches}

    def worker_state(self, pass_index: int) -> dict[str, Any]:
        """The state of one of this process's workers."""
        own = self.copies.all[pass_index]
        return {
            "copy": dict(zip(self.names, own.params, strict=True)),
            "buffers": list(own.buffers),
            "optimizer": self.copies.optimizer_state(pass_index),
            "samples": self._counts.state(pass_index),
        }

    def restore(self, shared: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> None:
        """Continue with the states of a checkpoint."""
        self._begun = True
        self._states = [
            {key: kept.to(anchor.device) for key, kept in shared["merges"][name].items()}
            for name, anchor in zip(self.names, self.anchors, strict=True)
        ]
        self._sent_at, self.batches = list(shared["sent_at"]), shared["batches"]
        self._pending = []
        for each in shared["pending"]:
            self.exchange.load(each["fragment"], each["means"])
            self._pending.append(Pending(each["fragment"], each["finish_step"], each["distance"]))
        for pass_index, own in enumerate(workers):
            copy = [own["copy"][name] for name in self.names]
            self.copies.load(pass_index, copy, own["buffers"], own["optimizer"])
            self._counts.load(pass_index, own["samples"])


def _bits(value: float) -> int:
    """A float as the integer of the same bits."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def _double(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])
