"""Checks on a model and its optimizer before they are distributed."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from weft.errors import UserError
from weft.runtime.loop.logical_workers import Passes


def check_model(model: nn.Module, optimizer: Optimizer, device: torch.device, passes: Passes) -> None:
    """Raise UserError for a model that this run cannot train."""
    mine = set(model.parameters())
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p.requires_grad for p in mine):
        raise UserError("the model has no parameter that trains; unfreeze some before run.distribute()")
    if not all(p in mine for p in theirs):
        raise UserError("the optimizer steps parameters that are not the model's; put all of them into one nn.Module")
    wrong = next((p for p in mine if p.device != device), None)
    if wrong is not None and wrong.device.type != device.type:
        raise UserError(f"the model is on {wrong.device}, the run on {device}; call model.to(run.device) first")
    synced = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if synced and passes.workers > 1 and (passes.count > 1 or device.type == "cpu"):
        raise UserError("SyncBatchNorm needs a GPU and a process for each worker; use BatchNorm here, or GroupNorm")
