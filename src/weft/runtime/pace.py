"""How fast a worker computes, where that is not simply as fast as it can: the lab's stragglers and sleeping compute.

    WEFT_SLOW=4x          everything takes four times as long; 4x@10%: in a tenth of the steps, drawn by seed and rank
    WEFT_SLEEP=FILE       forward, backward and the optimizer's step sleep as long as a profile says; nothing is learnt
    WEFT_PROFILE=FILE     measure the profile of this run, computing alone

All of it hangs on the model's own hooks, before any exchange does, so that every way of distributing, also those of
others, meets the same computing.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from weft.errors import SpellingError, UserError
from weft.profile import Profile

_LEAST_NAP_S = 0.0005
_WARMUP = 3


@dataclass(frozen=True)
class Slow:
    """Computing takes `factor` times as long, in a `share` of the steps."""

    factor: float = 1.0
    share: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Slow:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)x(?:@(\d+(?:\.\d+)?)%)?", text.strip())
        if match is None or float(match[1]) < 1 or float(match[2] or 100) > 100:
            raise SpellingError(f"'{text}' is not a slow-down; write 4x, or 4x@10% for a tenth of the steps")
        return cls(float(match[1]), float(match[2] or 100) / 100)

    def __str__(self) -> str:
        return f"{self.factor:g}x" + (f"@{self.share * 100:g}%" if self.share < 1 else "")

    def now(self, seed: int, rank: int, step: int) -> float:
        """This step's factor: it depends on the run's seed, the worker and the step, and on nothing else."""
        if self.share < 1.0 and random.Random(f"{seed}/{rank}/{step}").random() >= self.share:
            return 1.0
        return self.factor


class Pace:
    """Attached to a model once, before it is distributed."""

    def __init__(self, seed: int, rank: int, step: Callable[[], int]) -> None:
        env = os.environ
        self.slow = Slow.parse(env["WEFT_SLOW"]) if env.get("WEFT_SLOW") else Slow()
        self.profile = Profile.read(Path(env["WEFT_SLEEP"])) if env.get("WEFT_SLEEP") else None
        self.write = Path(env["WEFT_PROFILE"]) if env.get("WEFT_PROFILE") else None
        self.factor = lambda: self.slow.now(seed, rank, step())

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        if self.profile is not None:
            Sleeper(self.profile, self.factor).attach(model, optimizer)
        elif self.slow.factor > 1:
            _Straggler(self.factor).attach(model, optimizer)
        if self.write is not None:
            _Profiler(self.write).attach(model, optimizer)


class _Straggler:
    """Stretches real computing: after each part, idle for (factor - 1) times as long as it took."""

    def __init__(self, factor: Callable[[], float]) -> None:
        self.factor, self.now, self.backlog_s = factor, 1.0, 0.0
        self.mark = time.perf_counter()

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        model.register_forward_pre_hook(lambda *_: self._start())
        model.register_forward_hook(lambda *_: self._stretch())
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda _: self._stretch())
        _replace_step(optimizer, self._step, optimizer.step)

    def _start(self) -> None:
        self.now = self.factor()
        self._mark()

    def _mark(self) -> None:
        self.mark = time.perf_counter()

    def _stretch(self) -> None:
        self.backlog_s += (time.perf_counter() - self.mark) * (self.now - 1)
        if self.backlog_s > _LEAST_NAP_S:
            began = time.perf_counter()
            time.sleep(self.backlog_s)
            self.backlog_s -= time.perf_counter() - began
        self._mark()

    def _step(self, optimizer: Optimizer, step: Callable[..., Any]) -> Any:
        began = time.perf_counter()
        result = step()
        _sleep_until(time.perf_counter() + (time.perf_counter() - began) * (self.now - 1))
        return result


class Sleeper:
    """Replaces forward, backward and the optimizer's step by sleeping until each part would have been done.

    Gradients are real memory, of the right shapes and with random values; hooks, exchanges and steps are real.
    """

    def __init__(self, profile: Profile, factor: Callable[[], float]) -> None:
        self.profile, self.factor, self.now = profile, factor, 1.0
        self.due = 0.0
        self.outputs: dict[Any, Any] = {}

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        listed = [name for name, _ in self.profile.backward]
        if set(listed) != set(named):
            odd = next(iter(set(listed) ^ set(named)))
            raise UserError(
                f"the profile and the model disagree about '{odd}'; measure the profile with this very model"
            )
        self.parts = [(named[name], seconds) for name, seconds in self.profile.backward]
        self.numel = sum(p.numel() for p, _ in self.parts)
        random = torch.Generator().manual_seed(0)
        self.values = {p: torch.randn(p.shape, generator=random).to(p) * 1e-3 for p, _ in self.parts}
        self.model, self.compute = model, model.forward
        model.forward = self._forward
        _replace_step(optimizer, self._step, optimizer.step)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        output = self._output(*args, **kwargs)
        if not self.model.training:
            return output
        self.now = self.factor()
        carry = torch.zeros((), requires_grad=True)
        due, whole = began, self.profile.backward_s
        for parameter, seconds in reversed(self.parts):
            asked = time.perf_counter()
            parameter.data_ptr()  # a layer's forward needs its parameters, and waits for one that is still to come
            due += time.perf_counter() - asked
            due += self.profile.forward_s * self.now * (seconds / whole if whole else 1 / len(self.parts))
            carry = _Nap.apply(carry, parameter, self, seconds)  # type: ignore[no-untyped-call]
            _sleep_until(due)
        self.due = time.perf_counter()
        return pytree.tree_map_only(Tensor, lambda t: t + carry if t.is_floating_point() else t, output)

    def _output(self, *args: Any, **kwargs: Any) -> Any:
        """What comes out for inputs of these shapes: the first time, one real forward shows it."""
        shapes = tuple(leaf.shape for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if shapes not in self.outputs:
            with torch.no_grad():
                self.outputs[shapes] = self.compute(*args, **kwargs)
        return self.outputs[shapes]

    def _step(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        mine = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        _sleep_until(time.perf_counter() + self.profile.optimizer_s * self.now * mine / self.numel)


class _Nap(torch.autograd.Function):
    """One parameter's part of backward: sleeps until it is due, then its gradient is there."""

    @staticmethod
    def forward(ctx: Any, carry: Tensor, parameter: Tensor, sleeper: Sleeper, seconds: float) -> Tensor:
        ctx.parameter, ctx.sleeper, ctx.seconds = parameter, sleeper, seconds
        return carry.view_as(carry)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = ctx.sleeper.values[ctx.parameter].clone()
        ctx.sleeper.due += ctx.seconds * ctx.sleeper.now
        _sleep_until(ctx.sleeper.due)
        return grads[0], grad, None, None


def _replace_step(
    optimizer: Optimizer, act: Callable[[Optimizer, Callable[..., Any]], Any], step: Callable[..., Any]
) -> None:
    """Let `act` take the step instead: the whole optimizer's, or that of one with some of its parameters."""
    func = step.__func__ if isinstance(step, MethodType) else None

    def paced(self: Optimizer, closure: Any = None) -> Any:
        return act(self, (lambda: func(self)) if func else step)

    optimizer.step = MethodType(paced, optimizer)  # type: ignore[method-assign]


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > _LEAST_NAP_S:
        time.sleep(left)


class _Profiler:
    """Measures a profile while the job computes; written anew every few steps, as medians after warm-up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[tuple[float, list[tuple[str, float]], float]] = []

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        model.register_forward_pre_hook(lambda module, _: self._began() if module.training else None)
        model.register_forward_hook(lambda module, *_: self._forwarded() if module.training else None)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))
        optimizer.register_step_pre_hook(lambda *_: self._stepping())
        optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _began(self) -> None:
        self.start = time.perf_counter()
        self.arrivals: list[tuple[str, float]] = []

    def _forwarded(self) -> None:
        self.forward = self.last = time.perf_counter()

    def _arrived(self, name: str) -> None:
        now = time.perf_counter()
        self.arrivals.append((name, now - self.last))
        self.last = now

    def _stepping(self) -> None:
        self.stepping = time.perf_counter()

    def _stepped(self) -> None:
        step = (self.forward - self.start, self.arrivals, time.perf_counter() - self.stepping)
        self.steps.append(step)
        if len(self.steps) > _WARMUP:
            self._write()

    def _write(self) -> None:
        steps = self.steps[_WARMUP:]
        middle = statistics.median
        order = [name for name, _ in steps[-1][1]]
        took = {name: middle(dict(arrivals).get(name, 0.0) for _, arrivals, _ in steps) for name in order}
        Profile(
            forward_s=middle(forward for forward, _, _ in steps),
            backward=tuple(took.items()),
            optimizer_s=middle(optimizer for _, _, optimizer in steps),
        ).write(self.path)
