"""The plainest training loop, for tests that need some training and no particular one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], Tensor]


def squares(model: nn.Module, x: Tensor) -> Tensor:
    """The mean square of the output."""
    return model(x).square().mean()  # type: ignore[no-any-return]


def regression(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean square error."""
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def fit(model: nn.Module, optimizer: Any, feed: Iterable[Any], loss_of: Loss = squares, *followers: Any) -> list[float]:
    """Backward, step and zero_grad for each batch, then a step of each follower; returns the losses."""
    losses = []
    for batch in feed:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for follower in followers:
            follower.step()
        losses.append(loss.detach())  # read at the end, so that no device is waited for
    return [loss.item() for loss in losses]


def values(model: nn.Module) -> list[float]:
    """All parameters, one after another."""
    return [value for p in model.parameters() for value in p.flatten().tolist()]
