"""A server's copy of a bundle, and an optimizer of the job's type that updates it."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.errors import LoopError
from weft.ops import Spec
from weft.runtime.server.protocol import Hyper


@dataclass(frozen=True)
class BundleState:
    """A server's copy of a bundle: tensors, their specs for compressors, and the optimizer that updates them."""

    specs: Sequence[Spec]
    parts: Sequence[Tensor]
    optimizer: Optimizer | None
    """None if these are not updated."""
    groups: Sequence[int] = (0,)
    """The numbers of the job's parameter groups that its own groups correspond to."""

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts)

    def step(self, grads: Sequence[Tensor | None]) -> None:
        for part, grad in zip(self.parts, grads, strict=True):
            part.grad = grad
        if self.optimizer is not None:
            self.optimizer.step()
        for part in self.parts:
            part.grad = None  # the gradient is in the memory of a message

    def set_numbers(self, hyper: Hyper) -> None:
        """Set the hyperparameters of the next step."""
        if self.optimizer is None:
            return
        for group, number in zip(self.optimizer.param_groups, self.groups, strict=True):
            known = {name: value for name, value in hyper[number].items() if name in group}
            group.update({name: _like(group[name], value) for name, value in known.items()})

    def state(self) -> list[Any]:
        """The optimizer's state for each part."""
        return [dict(self.optimizer.state.get(part, {})) if self.optimizer else {} for part in self.parts]

    def set(self, values: Sequence[Tensor], state: Sequence[dict[str, Any]]) -> None:
        for part, given, known in zip(self.parts, values, state, strict=True):
            part.detach().copy_(given.view(part.shape))
            if known and self.optimizer is not None:
                self.optimizer.state[part] = known


def part_optimizer(
    optimizer: Optimizer, parts: Mapping[Tensor, Sequence[Tensor]]
) -> tuple[Optimizer | None, list[int]]:
    """An optimizer of the same type and options for parts of some parameters; and the numbers of its groups."""
    groups, numbers = [], []
    for number, group in enumerate(optimizer.param_groups):
        own = [part for param in group["params"] for part in parts.get(param, ())]
        if own:
            groups.append({name: value for name, value in group.items() if name != "params"} | {"params": own})
            numbers.append(number)
    if not groups:
        return None, []
    takes = inspect.signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in takes}
    return type(optimizer)(groups, **options), numbers


_HOW = {"foreach", "fused", "capturable", "differentiable"}
"""Options of the implementation rather than the algorithm: each process has its own."""


def hyper(optimizer: Optimizer) -> Hyper:
    """The options of each group, which a scheduler may change from step to step, as JSON values."""
    wanted = optimizer.defaults.keys() - _HOW
    return [
        {name: _plain(name, value) for name, value in group.items() if name in wanted}
        for group in optimizer.param_groups
    ]


def _plain(name: str, value: Any) -> Any:
    """A number of any type as a Python number; tuples become lists."""
    if value is None or type(value) in (float, int, bool, str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(name, each) for each in value]
    if isinstance(value, Tensor | numpy.generic | numpy.ndarray) and math.prod(value.shape) == 1:
        return value.item()
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise LoopError(
        f"The optimizer's {name} is a {type(value).__name__}, which cannot be sent to servers. Use a number, or "
        "another topology, such as direct."
    )


def _like(old: Any, new: Any) -> Any:
    """Convert an option to the optimizer's own type: tensors stay tensors, tuples stay tuples."""
    if isinstance(new, list):
        olds = old if isinstance(old, tuple | list) and len(old) == len(new) else [None] * len(new)
        return tuple(_like(each, value) for each, value in zip(olds, new, strict=True))
    if isinstance(old, Tensor) and isinstance(new, int | float):
        return torch.full_like(old, new)
    return new
