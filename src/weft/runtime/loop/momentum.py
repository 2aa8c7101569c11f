"""Momentum that a compressor takes over from the optimizer."""

from __future__ import annotations

from torch.optim import SGD, Optimizer

from weft.errors import LoopError, UserError
from weft.strategy import Strategy, wrapped


def claims(strategy: Strategy) -> bool:
    return any("momentum" in layer.claims for layer in wrapped(strategy.compression))


def claimed_momentum(strategy: Strategy, optimizer: Optimizer) -> float | None:
    """The momentum of the loop's SGD, which from now on runs without it; None if no compressor claims it."""
    if not claims(strategy):
        return None
    name = str(strategy.compression)
    if not isinstance(optimizer, SGD):
        raise UserError(
            f"{name} needs the momentum of SGD, but the optimizer is {type(optimizer).__name__}; "
            "use torch.optim.SGD(momentum=0.9), or error_feedback(topk), which leaves momentum to the optimizer"
        )
    found = {group["momentum"] for group in optimizer.param_groups}
    if len(found) > 1 or any(group["dampening"] or group["nesterov"] for group in optimizer.param_groups):
        raise UserError(
            f"{name} takes over one plain momentum; give all parameter groups the same, without dampening or nesterov"
        )
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    return float(found.pop())


def check_claims(optimizer: Optimizer) -> None:
    """Raise LoopError if the momentum was set again, as some schedulers do: it would be applied twice."""
    if any(group["momentum"] for group in optimizer.param_groups):
        raise LoopError(
            "the optimizer's momentum was set, but the compressor has taken it over; turn off its schedule, as in "
            "OneCycleLR(cycle_momentum=False)"
        )
