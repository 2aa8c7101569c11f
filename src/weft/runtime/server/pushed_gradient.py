"""A gradient that was pushed to servers: any other use would see one worker's share alone, and is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.runtime.loop import refusals
from weft.runtime.loop.tensor_metadata import METADATA_READS


class PushedGradient(Tensor):
    """A gradient that was pushed: reading it would give this worker's share alone."""

    @staticmethod
    def of(grad: Tensor) -> Tensor:
        pushed: Tensor = grad.as_subclass(PushedGradient)
        return pushed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in METADATA_READS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise refusals.pushed_gradient_read()
