"""Hooks that the loop has registered on an optimizer's step, or on every optimizer's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether a hook observes whole steps of this optimizer."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    everyone = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("weft.") for hook in everyone)


def require_before_step(check: Callable[[], None]) -> RemovableHandle:
    """Call `check` before each step of every optimizer; it raises the reason why there must be none."""
    return register_optimizer_step_pre_hook(lambda *_: check())


@contextmanager
def step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Run the hooks around a step that another process takes in place of this optimizer."""
    for hook in [*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]:
        hook(optimizer, (), {})
    yield
    for hook in [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]:
        hook(optimizer, (), {})
