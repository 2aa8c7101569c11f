"""Checks on a model and its optimizer before they are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from weft.errors import UserError
from weft.runtime.loop.logical_workers import Passes
from weft.runtime.loop.sample_shares import Count
from weft.synchrony import Synchrony


def check_model(model: nn.Module, optimizer: Optimizer, device: torch.device, passes: Passes) -> None:
    """Raise UserError for a model that this run cannot train."""
    mine = set(model.parameters())
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p.requires_grad for p in mine):
        raise UserError("the model has no parameter that trains; unfreeze some before run.distribute()")
    if not all(p in mine for p in theirs):
        raise UserError("the optimizer steps parameters that are not the model's; put all of them into one nn.Module")
    synced = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if synced and passes.workers > 1 and (passes.count > 1 or device.type == "cpu"):
        raise UserError("SyncBatchNorm needs a GPU and a process for each worker; use BatchNorm here, or GroupNorm")


def check_local(followers: Sequence[Any], passes: Passes) -> None:
    """Raise UserError for objects that cannot follow a local optimizer."""
    for follower in followers:
        if isinstance(follower, Optimizer):
            raise UserError(
                "workers with local optimizers have one each; put the parameters of the second optimizer into a group "
                "of the first, or use the optimization gradient"
            )
        if isinstance(follower, nn.Module):
            raise UserError(
                f"{type(follower).__name__} would average one worker's local model; do not pass it to "
                "run.distribute(), and update it inside `with run.merged():`"
            )
        if isinstance(follower, GradScaler) and follower.is_enabled() and passes.count > 1:
            raise UserError(
                "a GradScaler scales the gradients of one worker, and this process carries several local optimizers; "
                "start a process for each worker"
            )
    if passes.sums:
        raise UserError(
            'reduction="sum" adds up the gradients of all workers, and local optimizers exchange none; leave it out'
        )


def check_data(data: str) -> None:
    """Raise UserError for an unknown source of batches."""
    if data not in ("shard", "own"):
        raise UserError(f'data={data!r} is not known; use "shard", or "own" for batches that are not of run.shard()')


def check_reduction(reduction: str, synchrony: Synchrony) -> bool:
    """Whether gradients are added up undivided. Raises UserError where that has no meaning."""
    if reduction not in ("mean", "sum"):
        raise UserError(f'reduction={reduction!r} is not known; say "mean" or "sum", as the loss function does')
    if reduction == "sum" and not synchrony.lockstep:
        raise UserError(
            f'reduction="sum" adds up the gradients of one step, and under {synchrony.name} workers are at different '
            "steps; let the loss be a mean, and leave it out"
        )
    return reduction == "sum"


def check_samples(samples: Count | None, own: bool, synchrony: Synchrony) -> None:
    """Raise UserError where `run.shard(samples=...)` has no meaning."""
    if samples is not None and own:
        raise UserError("samples= and own=True cannot go together; leave own=True out, and give one common loader")
    if samples is not None and not synchrony.lockstep:
        raise UserError(
            f"samples= compares the batches of one step, and under {synchrony.name} workers are at different steps; "
            "leave it out, or use bsp"
        )
