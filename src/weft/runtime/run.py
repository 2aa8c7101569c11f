"""A training loop, distributed. Read this first, then `modes/__init__.py`.

    run = weft.init()
    model, optimizer = run.distribute(model, optimizer)
    for x, y in run.shard(loader):       # this worker's batches, on the run's device
        loss = loss_fn(model(x), y)
        loss.backward()                  # hooks hand gradients to the mode; when it returns, they are the mean
        optimizer.step(); optimizer.zero_grad()
        run.log(loss=loss)

Model and optimizer stay the user's own objects. `modes/select.py` chooses how the run is carried out. `Run` documents
the public methods; `loop/worker_run.py` or `server/process.py` implements them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import LoopError
from weft.runtime.loop.epochs import Epochs
from weft.runtime.loop.evaluation import Evaluation
from weft.runtime.loop.process_run import ProcessRun
from weft.runtime.loop.reductions import Figure
from weft.runtime.loop.sample_shares import Count
from weft.runtime.loop.shard import Shard
from weft.runtime.modes.select import process_run
from weft.strategy import Strategy


def init(
    strategy: str | Strategy | None = None,
    *,
    steps: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    save_every: int | None = None,
    resume: str | Path | None = None,
    data: Literal["shard", "own"] = "shard",
) -> Run:
    """Join the run that this process belongs to; alone, a run of one worker.

    Options of `weft train` take precedence. `steps` bounds the optimizer steps of `run.shard`; `seed` seeds torch,
    numpy and random. A run with a folder `out` saves itself every `save_every` steps and when it ends; 0: never.
    `resume` is a checkpoint. `data="own"`: the loop takes batches from elsewhere, and different ones for each worker.
    """
    global _current, joined
    if _current is not None:
        raise LoopError("weft.init() ran twice; keep the run it returned, or close() it first")
    joined = True
    options: dict[str, Any] = {"steps": steps, "seed": seed, "device": device, "out": out, "save_every": save_every}
    run = Run(process_run(strategy, **options, resume=resume, data=data))
    if run.world.server is None:
        _current = run
    return run


_current: Run | None = None
joined = False
"""Whether this process has ever called init."""


def close(*, well: bool = True) -> None:
    """Close the present run, if there is one."""
    if _current is not None:
        _current.close(well=well)


class Run:
    """One process's part of a training run."""

    def __init__(self, process: ProcessRun) -> None:
        self._process = process
        self.world, self.seed, self.folder = process.world, process.seed, process.folder
        self.strategy = process.strategy
        """How the run is distributed."""
        self.steps = process.steps
        """Optimizer steps after which `shard` and `epochs` end; None: not bounded."""
        self.device = process.device
        """The device of the model and the batches."""

    @property
    def rank(self) -> int:
        """The logical worker whose pass it is; its data order and random numbers follow from this number."""
        return self._process.rank

    @property
    def workers(self) -> int:
        """Logical workers of the run."""
        return self.world.workers

    @property
    def passes(self) -> int:
        """Logical workers that this process carries: the loop's body runs once for each of them in a step."""
        return self._process.passes

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that should print and save."""
        return self._process.is_main

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        return self._process.step

    def distribute(
        self, model: nn.Module, optimizer: Optimizer, *followers: Any, unused: bool = False, reduction: str = "mean"
    ) -> Any:
        """Make model and optimizer part of the run, on its device; returns the same objects.

        `followers` step along and are kept in checkpoints: schedulers, a GradScaler, an average of the weights, a
        torch.Generator; any object with a state_dict. `unused=True` where parameters may get a gradient in some steps.
        `reduction="sum"` where the loss is a sum over the batch: gradients are added undivided, a missing batch as 0.
        """
        return self._process.distribute(model, optimizer, *followers, unused=unused, reduction=reduction)

    def shard(
        self,
        loader: Iterable[Any],
        *,
        epochs: int | None = 1,
        own: bool = False,
        samples: Count | None = None,
        device: bool = True,
    ) -> Shard:
        """This worker's batches of `loader`, which every process builds alike.

        They are dealt in turn, and moved to the run's device unless `device=False`. `epochs=None` repeats the loader
        until the run's steps are used up. `own=True`: the loader already holds only this worker's data; lengths may
        differ. `samples` counts a batch where its first dimension does not, as where the loss is a mean over tokens. A
        gradient is weighted by its count over that of all workers; 0 adds nothing.
        """
        return self._process.shard(loader, epochs=epochs, own=own, samples=samples, device=device)

    def log(self, **values: float | Tensor) -> None:
        """Values of this step for the run folder; tensors are read later, so the device is not stalled."""
        self._process.log(**values)

    def epochs(self, count: int) -> Epochs:
        """The numbers 0 to `count` - 1; a resumed run skips epochs whose body has ended, and the body's code with them.

        The body of an interrupted epoch runs again, on what is left. Followers keep values of the loop in checkpoints.
        """
        return self._process.epochs(count)

    def evaluate(self, loader: Iterable[Any], *, device: bool = True) -> Evaluation:
        """Batches of `loader` to evaluate on: every batch goes to exactly one worker, and all are dealt.

        `--steps` does not bound them, a resumed run does not skip them, and training's random numbers stay as they are.
        """
        return self._process.evaluate(loader, device=device)

    def merged(self) -> AbstractContextManager[None]:
        """Inside, the model holds the values that all workers share, as in `evaluate`; nothing is communicated."""
        return self._process.merged()

    def mean(self, *, weight: Figure = 1, **figures: Figure) -> dict[str, Any]:
        """The means of figures over all processes, in float64, weighted by each one's `weight`, such as its samples.

        Every process calls it, once, after its loop over `evaluate`; so also `sum` and `gather`.
        """
        return self._process.reductions().mean(figures, weight)

    def sum(self, **figures: Figure) -> dict[str, Any]:
        """The sums of figures over all processes, in float64."""
        return self._process.reductions().sum(figures)

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, joined along their first dimension, in which they may differ."""
        return self._process.reductions().gather(tensor)

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward inside adds gradients up locally; the next one outside exchanges the sum."""
        return self._process.accumulate()

    def clip(self, norm: float) -> Tensor:
        """Scale gradients so that their global norm is at most `norm`; returns the norm before."""
        return self._process.clip(norm)

    def report(self, **values: float | Tensor) -> None:
        """Final figures for the summary, such as a held-out loss."""
        self._process.report(**values)

    def save(self) -> None:
        """Save the run now, within a step at its end; in a loop over `run.shard` this happens by itself."""
        self._process.save()

    def close(self, *, well: bool = True) -> None:
        """Write what is left and leave the group. Runs at exit by itself."""
        global _current
        if _current is self:
            _current = None
        self._process.close(well=well)
