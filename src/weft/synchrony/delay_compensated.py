from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from weft.synchrony import Wrapper

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class DelayCompensated(Wrapper):
    """Corrects a stale gradient to first order, with g g as a cheap Hessian [DC-ASGD: Zheng et al. 2017].

    g + lam g g (now - read); the server keeps the version that each worker read.
    """

    lam: float = 0.04
    """The strength of the correction; the paper's constant variant."""

    def __post_init__(self) -> None:
        if not self.lam >= 0:
            raise ValueError(f"lam is {self.lam}, but must not be negative")

    @property
    def looks_back(self) -> bool:
        return True

    def correct(self, grad: Tensor, now: Tensor, read: Tensor, staleness: int) -> Tensor | None:
        made_fit = self.inner.correct(grad, now, read, staleness)
        if made_fit is None or not staleness:
            return made_fit
        return made_fit + self.lam * made_fit * made_fit * (now - read)
