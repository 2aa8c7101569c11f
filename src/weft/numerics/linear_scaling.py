from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class LinearScaling(LambdaLR):
    """n workers take n times the batch, so the learning rate becomes n times as large [Goyal et al. 2017].

    It grows there from its base value in a straight line over the first `warmup` steps (the paper's are five epochs),
    and stays, or goes on as `after` says, a factor by the number of steps behind the warm-up. Call `step()` once a
    step, and pass it along to `run.distribute`.
    """

    def __init__(self, optimizer: Optimizer, workers: int, warmup: int, after: Any = None) -> None:
        if workers < 1 or warmup < 0:
            raise ValueError("linear scaling needs at least one worker, and a warm-up of no steps or more")

        def factor(step: int) -> float:
            if step < warmup:
                return 1 + (workers - 1) * step / warmup
            return workers * (float(after(step - warmup)) if after is not None else 1.0)

        super().__init__(optimizer, factor)
