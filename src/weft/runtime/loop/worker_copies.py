"""Each logical worker's own copy of the model: parameters, gradients, buffers and the state of its optimizer.

The loop has one model and one optimizer. In a process that carries several workers they hold one worker's copy at a
time, which `show` exchanges for another's: parameters and state by reference, buffers by value.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.runtime.loop.buffers import BufferSlots


@dataclass
class Copy:
    """One worker's."""

    params: list[Tensor]
    grads: list[Tensor | None]
    buffers: list[Tensor]
    state: Any
    """The optimizer's `state`."""


class WorkerCopies:
    """The copies of one process's workers, by pass."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, params: Sequence[nn.Parameter], count: int) -> None:
        self.optimizer, self.params = optimizer, params
        self._slots = BufferSlots(model, 1)
        self.hidden = False
        """Whether the model holds other values than a copy meanwhile."""
        self.shown = 0
        """The pass whose worker's copy is in the model."""
        self.all = [self._copied(first=number == 0) for number in range(count)]

    def _copied(self, *, first: bool) -> Copy:
        """A copy of the model as it is; the first one is the model's own memory."""
        state = self.optimizer.state if first else copy.deepcopy(self.optimizer.state)
        if not first:  # deepcopy has copied the keys, too
            state = defaultdict(dict, zip(self.optimizer.state, state.values(), strict=True))
        params = [p.data if first else p.detach().clone() for p in self.params]
        return Copy(params, [None] * len(params), [b.clone() for b in self._slots.tensors], state)

    @property
    def buffers(self) -> list[Tensor]:
        """The model's present buffers."""
        return self._slots.tensors

    def show(self, pass_index: int) -> None:
        """Let the model and the optimizer hold a worker's copy."""
        if pass_index == self.shown:
            return
        self.keep()
        self.shown, now = pass_index, self.all[pass_index]
        for p, data, grad in zip(self.params, now.params, now.grads, strict=True):
            p.data, p.grad = data, grad
        self.optimizer.state = now.state
        _set(self.buffers, now.buffers)

    def keep(self) -> None:
        """Bring the shown copy up to date with the model and the optimizer."""
        if self.hidden:
            return
        now = self.all[self.shown]
        now.params, now.grads = [p.data for p in self.params], [p.grad for p in self.params]
        now.state = self.optimizer.state
        _set(now.buffers, self.buffers)

    @contextmanager
    def replaced(self, params: Sequence[Tensor], buffers: Sequence[Tensor]) -> Iterator[None]:
        """Let the model hold other values meanwhile; nothing is copied but buffers."""
        if self.hidden:  # within another such block
            yield
            return
        self.keep()
        self.hidden = True
        _point(self.params, params)
        _set(self.buffers, buffers)
        try:
            yield
        finally:
            self.hidden = False
            _point(self.params, self.all[self.shown].params)
            _set(self.buffers, self.all[self.shown].buffers)

    def set_buffers(self, values: Sequence[Tensor]) -> None:
        """Give every worker these buffers."""
        for each in self.all:
            _set(each.buffers, values)
        _set(self.buffers, values)

    def optimizer_state(self, pass_index: int) -> dict[str, Any]:
        """The state of a worker's optimizer, as in its `state_dict`."""
        shown = self.optimizer.state
        if pass_index != self.shown:
            self.optimizer.state = self.all[pass_index].state
        try:
            state: dict[str, Any] = self.optimizer.state_dict()["state"]
        finally:
            self.optimizer.state = shown
        return state

    def load(
        self, pass_index: int, params: Sequence[Tensor], buffers: Sequence[Tensor], state: Mapping[Any, Any]
    ) -> None:
        """Restore a worker's copy; gradients are not kept in checkpoints."""
        before = self.shown
        self.show(pass_index)
        with torch.no_grad():
            _set(self.all[pass_index].params, params)
        _set(self.buffers, buffers)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": copy.deepcopy(dict(state)), "param_groups": groups})
        self.keep()
        self.show(before)


def _set(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        if tensor is not value:
            tensor.copy_(value)


def _point(params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for p, value in zip(params, values, strict=True):
        p.data = value
