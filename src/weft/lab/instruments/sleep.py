"""Sleeping compute: the durations of a profile take the place of computing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from weft.errors import UserError
from weft.lab.instruments.straggler import Slow, replace_step, sleep_until
from weft.profile import Profile
from weft.runtime.loop.instruments import InstrumentedRun

_CUTS = 1 << 16
"""The number of different cuts of the bank of random numbers."""


@dataclass(frozen=True, kw_only=True)
class SleepingCompute:
    """Forward, backward and the optimizer's step sleep until each part would have been done.

    Gradients are real memory, of the right shapes and with random values, other ones in each process; hooks, exchanges
    and steps are real. Parameters stay as they are, except under local optimizers, whose models would otherwise have no
    differences: there each step adds random changes of the size of AdamW's.
    """

    profile: Profile
    slow: Slow = Slow()

    def attach(self, run: InstrumentedRun, model: nn.Module, optimizer: Optimizer) -> None:
        changes = RandomChanges(run, model) if run.strategy.merges_models else None
        _Sleeper(self.profile, self.slow.of(run), model, optimizer, run.rank, changes)


class RandomChanges:
    """A step p -= lr g with g of unit variance, as AdamW's steps have about.

    g is a random cut from one bank of normal numbers, which costs less than new numbers, and as much as an addition. It
    follows from the run's seed, the worker's rank and the step.
    """

    def __init__(self, run: InstrumentedRun, model: nn.Module) -> None:
        self.run = run
        params = [p for p in model.parameters() if p.requires_grad]
        random = torch.Generator().manual_seed(run.rank)
        self.bank = torch.randn(max(p.numel() for p in params) + _CUTS, generator=random).to(params[0].device)

    @torch.no_grad()
    def apply(self, optimizer: Optimizer) -> None:
        """Change all parameters of an optimizer."""
        draws = Random(f"{self.run.seed}/{self.run.rank}/{self.run.step}")
        for group in optimizer.param_groups:
            for p in group["params"]:
                at = draws.randrange(_CUTS)
                if p.requires_grad:
                    p.add_(self.bank[at : at + p.numel()].view(p.shape), alpha=-float(group["lr"]))


class _Sleeper:
    """Deadlines are absolute, so that late wake-ups do not add up."""

    def __init__(
        self,
        profile: Profile,
        factor: Callable[[], float],
        model: nn.Module,
        optimizer: Optimizer,
        rank: int,
        changes: RandomChanges | None,
    ) -> None:
        self.profile, self.factor, self.now, self.changes = profile, factor, 1.0, changes
        self.deadline = 0.0
        self.outputs: dict[Any, Any] = {}
        self.parts = _parts(profile, model)
        self.numel = sum(p.numel() for p, _ in self.parts)
        random = torch.Generator().manual_seed(rank)
        self.values = {p: torch.randn(p.shape, generator=random).to(p) * 1e-3 for p, _ in self.parts}
        self.model, self.compute = model, model.forward
        model.forward = self._forward
        replace_step(optimizer, self._step)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        output = self._output(*args, **kwargs)
        if not self.model.training:
            return output
        self.now = self.factor()
        carry = torch.zeros((), requires_grad=True)
        deadline, backward_s = began, self.profile.backward_s
        for parameter, seconds in reversed(self.parts):
            before = time.perf_counter()
            parameter.data_ptr()  # a layer's forward needs its parameters, and waits for one that is still to come
            deadline += time.perf_counter() - before
            share = seconds / backward_s if backward_s else 1 / len(self.parts)
            deadline += self.profile.forward_s * self.now * share
            carry = _Sleep.apply(carry, parameter, self, seconds)  # type: ignore[no-untyped-call]
            sleep_until(deadline)
        self.deadline = time.perf_counter()
        return pytree.tree_map_only(Tensor, lambda t: t + carry if t.is_floating_point() else t, output)

    def _output(self, *args: Any, **kwargs: Any) -> Any:
        """The output for inputs of these shapes; the first time, one real forward computes it."""
        shapes = tuple(leaf.shape for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if shapes not in self.outputs:
            with torch.no_grad():
                self.outputs[shapes] = self.compute(*args, **kwargs)
        return self.outputs[shapes]

    def _step(self, optimizer: Optimizer, step: Callable[[], Any]) -> None:
        began = time.perf_counter()
        mine = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        if self.changes is not None:
            self.changes.apply(optimizer)
        sleep_until(began + self.profile.optimizer_s * self.now * mine / self.numel)


def _parts(profile: Profile, model: nn.Module) -> list[tuple[nn.Parameter, float]]:
    """The model's parameters with their seconds of backward, in the profile's order."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    profiled = {name for name, _ in profile.backward}
    if profiled != set(named):
        odd = next(iter(profiled ^ set(named)))
        raise UserError(f"the profile and the model disagree about '{odd}'; measure the profile with this very model")
    return [(named[name], seconds) for name, seconds in profile.backward]


class _Sleep(torch.autograd.Function):
    """One parameter's part of backward: sleeps until its deadline, then hands over its gradient."""

    @staticmethod
    def forward(ctx: Any, carry: Tensor, parameter: Tensor, sleeper: _Sleeper, seconds: float) -> Tensor:
        ctx.parameter, ctx.sleeper, ctx.seconds = parameter, sleeper, seconds
        return carry.view_as(carry)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = ctx.sleeper.values[ctx.parameter].clone()
        ctx.sleeper.deadline += ctx.seconds * ctx.sleeper.now
        sleep_until(ctx.sleeper.deadline)
        return grads[0], grad, None, None
