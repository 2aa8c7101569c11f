"""The state of followers: objects that the loop passes to `run.distribute` beside model and optimizer.

Schedulers, scalers and averages act once per step and are equal in every process, which stores them once. A follower of
the loop's own, such as sums of an epoch's losses, counts what its process has seen; a small state is stored for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from weft.errors import UserError
from weft.runtime.loop.logical_workers import Passes
from weft.runtime.loop.optimizer import FOLLOWED

_WRAPPED = ("step", "update", "unscale_")
_MOST_VALUES = 4096


def follower_state(follower: Any) -> Any:
    if not hasattr(follower, "state_dict"):
        raise UserError(
            f"run.distribute() was given a {type(follower).__name__}, which has no state_dict(), so a checkpoint "
            "cannot hold it; give it one, or omit it, or turn checkpoints off with --save-every 0"
        )
    return {key: each for key, each in follower.state_dict().items() if not (key in _WRAPPED and callable(each))}


def own_states(followers: Sequence[Any], *, local: bool) -> list[Any]:
    """The state of each follower that counts what its process has seen; None for the others.

    `local`: workers step by themselves, and each has scales of its own.
    """
    own = [not _acts_per_step(each) or (local and isinstance(each, GradScaler)) for each in followers]
    states = [follower_state(each) if mine else None for each, mine in zip(followers, own, strict=True)]
    return [state if state is not None and _size(state) <= _MOST_VALUES else None for state in states]


def states_of(workers: Mapping[int, Mapping[str, Any]], common: Sequence[Any], passes: Passes) -> list[Any]:
    """The states to restore in this process, from those of the workers that it takes over."""
    ranks = list(passes.ranks)
    heirs = [workers[rank] for rank in sorted(workers) if "ranks" in workers[rank]]
    first = workers.get(ranks[0], {})
    found = []
    for number, state in enumerate(common):
        own = [heir["followers"][number] for heir in heirs if heir["followers"][number] is not None]
        if not own or "ranks" not in first:
            found.append(state)
        elif first["ranks"] == ranks:
            found.append(first["followers"][number])
        elif all(len(heir["ranks"]) == 1 for heir in heirs) and all(_equal(each, state) for each in own):
            found.append(state)
        else:
            raise UserError(
                f"follower {number + 1} of run.distribute() has a state of its own in each process, which cannot be "
                "divided over other processes; resume with as many workers and processes as before"
            )
    return found


def _acts_per_step(follower: Any) -> bool:
    return isinstance(follower, nn.Module) or any(hasattr(follower, name) for name in FOLLOWED)


def _size(state: Any) -> int:
    """The number of values in a state."""
    if isinstance(state, Tensor):
        return state.numel()
    parts = state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else None
    return 1 if parts is None else sum(map(_size, parts))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
