"""NaN and infinity are found before they reach a model, a server or a checkpoint.

On a GPU an immediate answer would stall the device: gradients there are checked by `finite_gpu`, one step late.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.errors import LoopError
from weft.runtime.checks.finite_gpu import DeferredFiniteCheck

REMEDY = "Lower the learning rate, clip gradients, or use a GradScaler, which skips such a step."


def finite(flat: Tensor | None) -> bool:
    """Whether a tensor surely holds no NaN or infinity, in one pass at the speed of memory.

    False may also mean that the sum overflowed: `all_finite` decides.
    """
    assert flat is not None, "a bucket that is exchanged lies in one piece"
    return bool(torch.isfinite(total(flat)))


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds no NaN or infinity; a second pass only where the first one cannot tell."""
    return finite(tensor) or bool(torch.isfinite(tensor).all())


def total(tensor: Tensor) -> Tensor:
    """A sum that is not finite where a value is not; it may overflow by itself."""
    return tensor.detach().sum(dtype=torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None)


def check_gradient(name: str, grad: Tensor, step: int) -> None:
    """Refuse a gradient with NaN or infinity."""
    if not all_finite(grad):
        raise refusal(f"The gradient of {name} is NaN or infinite", step)


def refusal(finding: str, step: int) -> LoopError:
    """The error that ends a run, counted from step 1 as users do."""
    return LoopError(f"{finding} at step {step + 1}. {REMEDY}")


class LocalFiniteCheck:
    """Finite checks of a process that exchanges no gradients, just before each update."""

    def __init__(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self.names, self.params = names, params
        self._deferred = DeferredFiniteCheck()

    def check(self, step: int, where: str = "") -> None:
        """Refuse gradients with NaN or infinity. On a GPU they become zeros, and the next call raises."""
        self.look_back(step)
        grads = {i: _values(p.grad) for i, p in enumerate(self.params) if p.grad is not None}
        self._deferred.shield([((i,), grad) for i, grad in grads.items() if grad.is_cuda])
        here = {i: grad for i, grad in grads.items() if not grad.is_cuda}
        totals = [total(grad) for grad in here.values()]
        if totals and not torch.isfinite(torch.stack(totals)).all():
            found = next((i for i, grad in here.items() if not torch.isfinite(grad).all()), None)
            if found is not None:
                raise refusal(f"The gradient of {self.names[found]}{where} is NaN or infinite", step)

    def look_back(self, step: int) -> None:
        """Read a GPU's findings of the previous step."""
        before, self._deferred = self._deferred, DeferredFiniteCheck(step)
        zeroed, _ = before.read()
        if zeroed is not None:
            raise refusal(f"The gradient of {self.names[zeroed]} is NaN or infinite", before.step)


def _values(grad: Tensor) -> Tensor:
    return grad.detach()._values() if grad.is_sparse else grad.detach()
