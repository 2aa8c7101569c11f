"""The outer optimizer of DiLoCo: SGD with momentum, with the mean difference of the copies as its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.optimization import State

if TYPE_CHECKING:
    from torch import Tensor


def outer_sgd(
    anchor: Tensor, difference: Tensor, state: State, *, lr: float, momentum: float, nesterov: bool
) -> tuple[Tensor, State]:
    """As `torch.optim.SGD`: v = momentum v + d; anchor - lr (d + momentum v) with Nesterov's momentum, else - lr v."""
    if not momentum:
        return anchor - difference * lr, state
    velocity = difference + state["velocity"] * momentum if "velocity" in state else difference.clone()
    step = difference + velocity * momentum if nesterov else velocity
    return anchor - step * lr, {"velocity": velocity}
