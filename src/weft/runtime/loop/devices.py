"""Moves a model, its optimizer's state and the batches of a loop to the device of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import UserError


def move_training(model: nn.Module, optimizer: Optimizer, followers: Iterable[Any], device: torch.device) -> None:
    """Move the parameters, buffers and optimizer state that are elsewhere. The objects stay the same."""
    params = list(model.parameters())
    if any(p.is_meta for p in params):
        raise UserError("a parameter is on the meta device, without values; materialize the model before the call")
    if all(t.device == device for t in (*params, *model.buffers())):
        return
    model.to(device)
    if any(p is not before for p, before in zip(model.parameters(), params, strict=True)):
        raise UserError(
            "the model's parameters cannot be moved in place; call model.to(run.device) before building the optimizer"
        )
    for param, state in optimizer.state.items():
        for name, value in state.items():
            state[name] = _moved_state(name, value, param, optimizer)
    for follower in followers:
        if isinstance(follower, nn.Module):
            follower.to(device)


def _moved_state(name: str, value: Any, param: Tensor, optimizer: Optimizer) -> Any:
    """A value of a parameter's state; `step` stays on the host where the optimizer wants it there."""
    if not isinstance(value, Tensor):
        if _holds_tensors(value):
            raise UserError(
                f"{type(optimizer).__name__} keeps tensors inside {name!r} that cannot be moved; build it after "
                "model.to(run.device)"
            )
        return value
    fast = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    return value if name == "step" and not fast else value.to(param.device)


def _holds_tensors(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(isinstance(each, Tensor) or _holds_tensors(each) for each in inner)


def move_batch(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on `device`: tensors, mappings, tuples, lists, and objects with a `to` method."""
    if isinstance(batch, Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=batch.is_pinned())
    if isinstance(batch, Mapping):
        moved = {key: move_batch(each, device) for key, each in batch.items()}
        return moved if type(batch) is dict else _rebuilt(batch, moved)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_batch(each, device) for each in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move_batch(each, device) for each in batch)
    return batch.to(device) if callable(getattr(batch, "to", None)) else batch


def _rebuilt(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    """A mapping of the user's own class, such as a tokenizer's batch."""
    to = getattr(batch, "to", None)
    return to(next(iter(moved.values())).device) if callable(to) and _holds_tensors(moved) else moved
