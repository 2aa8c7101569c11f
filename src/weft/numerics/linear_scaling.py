from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class LinearScaling(LambdaLR):
    """n workers take n times the batch, so the learning rate becomes n times as large [Goyal et al. 2017].

    It grows linearly from its base value over the first `warmup` steps (five epochs in the paper). It is then constant,
    or multiplied by `after`, a function of the number of steps since the warm-up. Call `step()` once a step, and pass
    it to `run.distribute`.
    """

    def __init__(self, optimizer: Optimizer, workers: int, warmup: int, after: Any = None) -> None:
        if workers < 1 or warmup < 0:
            raise ValueError("linear scaling needs at least one worker, and a warm-up of no steps or more")

        def factor(step: int) -> float:
            if step < warmup:
                return 1 + (workers - 1) * step / warmup
            return workers * (float(after(step - warmup)) if after is not None else 1.0)

        super().__init__(optimizer, factor)
