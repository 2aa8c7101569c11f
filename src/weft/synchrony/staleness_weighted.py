from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft.synchrony import Wrapper

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class StalenessWeighted(Wrapper):
    """Weights a gradient of staleness s by 1 / (s + 1) [DynSGD: Jiang et al. 2017]."""

    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        made_fit = self.inner.correct(grad, now, read, staleness)
        return made_fit if made_fit is None or not staleness else made_fit / (staleness + 1)
