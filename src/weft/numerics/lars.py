from __future__ import annotations

from typing import Any

import torch

from weft.numerics._layerwise import Layerwise


class Lars(Layerwise):
    """SGD with momentum whose rate is scaled layer by layer [You et al. 2017].

    lr_l = lr eta |w| / (|g| + beta |w|); v = m v + lr_l (g + beta w); w = w - v. Vectors (biases, norms) keep the plain
    rate and no weight decay, as is usual, unless `vectors` is set.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 0.001,
        vectors: bool = False,
    ) -> None:
        if lr < 0 or momentum < 0 or weight_decay < 0 or eta <= 0:
            raise ValueError("lr, momentum and weight_decay must not be negative, and eta must be positive")
        usual = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta, "vectors": vectors}
        super().__init__(params, usual)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        grad, decay = param.grad, group["weight_decay"]
        assert grad is not None
        rate: Any = group["lr"]
        if param.dim() > 1 or group["vectors"]:
            weight, size = param.norm(), grad.norm()
            trust = group["eta"] * weight / (size + decay * weight)
            rate = rate * torch.where((weight > 0) & (size > 0), trust, 1.0)
            grad = grad.add(param, alpha=decay)
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        velocity = state["momentum_buffer"].mul_(group["momentum"]).add_(grad * rate)
        param.sub_(velocity)
