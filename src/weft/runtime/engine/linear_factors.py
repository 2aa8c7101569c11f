"""The factors of linear layers' gradients: the layers' inputs, and the gradients of their outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Factors:
    """Keeps the factors of each linear layer from forward and backward until its weight's gradient is taken.

    Only a layer that ran once in the step has factors.
    """

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
            if torch._C._functorch.peek_interpreter_stack() is not None:  # under torch.func there is no plain product
                self._runs[index] += 1
            elif out.requires_grad:
                self._inputs[index] = args[0].detach()
                out.register_hook(came_back)

        def came_back(grad: Tensor) -> None:
            self._returned[index] = grad.detach()

        layer.register_forward_hook(ran)

    def take(self, index: int, share: float) -> tuple[Tensor, Tensor] | None:
        """(G, X), one row per sample, with G'X equal to the gradient times `share`; None if they are not known."""
        runs, x, g = self._runs.pop(index, 0), self._inputs.pop(index, None), self._returned.pop(index, None)
        if runs != 1 or x is None or g is None:
            return None
        return g.reshape(-1, g.shape[-1]) * share, x.reshape(-1, x.shape[-1])
