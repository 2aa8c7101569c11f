"""What linear layers' gradients are made of: their inputs, and what came back to their outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Factors:
    """Kept from a layer's forward and backward until its weight's gradient is handed over, where it ran once."""

    def __init__(self, model: nn.Module, params: Sequence[Tensor]) -> None:
        self._inputs: dict[int, Tensor] = {}
        self._returned: dict[int, Tensor] = {}
        self._runs: Counter[int] = Counter()
        owners: Counter[Tensor] = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
        index: dict[Tensor, int] = {p: i for i, p in enumerate(params)}
        for module in model.modules():
            if type(module) is nn.Linear and module.weight in index and owners[module.weight] == 1:
                self._phases(index[module.weight], module)

    def _phases(self, index: int, layer: nn.Linear) -> None:
        def ran(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if not torch.is_grad_enabled():
                return
            self._runs[index] += 1
            if torch._C._functorch.peek_interpreter_stack() is not None:  # torch.func: no plain product of these two
                self._runs[index] += 1
            elif out.requires_grad:
                self._inputs[index] = args[0].detach()
                out.register_hook(came_back)

        def came_back(grad: Tensor) -> None:
            self._returned[index] = grad.detach()

        layer.register_forward_hook(ran)

    def take(self, index: int, share: float) -> tuple[Tensor, Tensor] | None:
        """(G, X), a row for each sample: the gradient, weighed by a share, is G'X; None where that cannot be said."""
        runs, x, g = self._runs.pop(index, 0), self._inputs.pop(index, None), self._returned.pop(index, None)
        if runs != 1 or x is None or g is None:
            return None
        return g.reshape(-1, g.shape[-1]) * share, x.reshape(-1, x.shape[-1])
