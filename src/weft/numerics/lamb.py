from __future__ import annotations

from typing import Any

import torch

from weft.numerics._layerwise import Layerwise


class Lamb(Layerwise):
    """Adam whose step is scaled layer by layer to the size of the weights [You et al. 2020].

    r = m^ / (sqrt(v^) + eps) + decay w; w = w - lr |w| / |r| r, with 1 for the ratio where either is 0.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        if lr < 0 or eps <= 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError("lr and weight_decay must not be negative, eps must be positive, and betas lie in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        grad, (first, second), state = param.grad, group["betas"], self.state[param]
        assert grad is not None
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        state["step"] += 1
        mean = state["exp_avg"].lerp_(grad, 1 - first) / (1 - first ** state["step"])
        square = state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second) / (1 - second ** state["step"])
        step = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * param
        weight, size = param.norm(), step.norm()
        ratio = torch.where((weight > 0) & (size > 0), weight / size, 1.0)
        param.sub_(group["lr"] * ratio * step)
