"""HOW is a run carried out? One contract, `Mode`, and one file for each way.

    single             one worker
    all_reduce         workers exchange gradient buckets beside backward
    parameter_server   hooks push gradients to servers; a step pulls the model
    local_steps        workers step copies of the model, and push and fetch now and then (Downpour)
    merging            every worker steps a copy with its own optimizer; copies are merged now and then
    shared_memory      workers of one host step one model in shared memory (Hogwild)
    foreign            another library's wrapper, for the lab's peers

`select.mode_of` chooses one of them. The modes with servers share `server_mode`, whose pulls are in `model_pull`; the
merges of `merging` are in `model_merges`.

`run.distribute` constructs the mode, restores a checkpoint into model and optimizer, and attaches the mode. From then
on a step is: hooks on parameters during backward, `check_step`, `step`, `zero_grad`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from weft.compression import State
from weft.runtime.engine.bucket_layout import SavedLayout
from weft.runtime.launch.malloc import keep_memory
from weft.runtime.launch.world import World
from weft.runtime.loop.logical_workers import Passes
from weft.runtime.record.clock import Clock
from weft.runtime.record.phases import PhaseTimer
from weft.strategy import Strategy
from weft.transport.collective import Processes


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The parts of a run that a mode works with."""

    strategy: Strategy
    world: World
    device: torch.device
    seed: int
    folder: Path | None
    timeout_s: float
    """How long to wait for a peer that is alive."""
    transport: Processes
    passes: Passes
    clock: Clock
    phases: PhaseTimer


class Mode(ABC):
    """One process's part in carrying out a run.

    Every mode implements the abstract methods. The others are hooks with a default, often to do nothing, for the modes
    that need them; a mode replaces a default as a whole and does not call it.
    """

    connects: ClassVar[bool] = True
    """Whether the workers' processes form a process group."""
    steps_each_pass: ClassVar[bool] = False
    """Whether each logical worker takes its own step, in its own pass: `pass_stepped`, and in the last pass `step`."""
    checkpoint_writers: ClassVar[int | None] = None
    """Number of processes that write the state which is equal in all of them; None: all of them."""

    def __init__(
        self, ctx: RunContext, model: nn.Module, optimizer: Optimizer, followers: Sequence[Any], *, unused: bool
    ) -> None:
        self.ctx, self.model, self.optimizer = ctx, model, optimizer
        self.termination_requested = False
        """Whether this process has received SIGTERM."""
        self.prepare()

    def prepare(self) -> None:
        """Every process starts from the model of process 0."""
        keep_memory()
        self.ctx.transport.spread([*self.model.parameters(), *self.model.buffers()])

    @abstractmethod
    def attach(self, layout: SavedLayout | None) -> None:
        """Register hooks. Model and optimizer hold the state that training starts from; `layout` comes with it."""

    @abstractmethod
    def step(self, update: Callable[[], Any]) -> Any:
        """Take the step of all logical workers of this process. `update` calls the optimizer's own step."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until the last step is complete. Raises LoopError if its gradients were not finite."""

    def fetch_final_model(self) -> None:
        """After the last step of all workers: have the model with all of their updates. A collective call."""
        self.flush()

    def finish(self) -> bool:
        """The loop has taken its last step. A collective call; returns whether the model has changed."""
        return False

    @property
    def accepts_closure(self) -> bool:
        """Whether `optimizer.step` may evaluate its closure several times: it sees one worker's loss alone."""
        return False

    @property
    def rejoined(self) -> bool:
        """Whether this worker takes the place of a lost one, while the run has advanced."""
        return False

    @property
    def leaving(self) -> bool:
        """Whether all workers terminate after the present step."""
        return self.termination_requested

    @property
    def owns_model(self) -> bool:
        """Whether no other process can have advanced the model since it was restored."""
        return self.ctx.strategy.synchrony.lockstep

    def request_termination(self) -> None:
        """SIGTERM: terminate together with all other workers, at the same step."""
        self.termination_requested = True

    def check_step(self) -> None:
        """Raise LoopError for a step that would train wrong."""

    def check_clip(self) -> None:
        """Raise LoopError where gradients cannot be clipped."""

    def pass_stepped(self, update: Callable[[], Any]) -> Any:
        """`step()` was called in a logical worker's pass that is not the last one of the step."""

    def zero_grad(self, clear: Callable[[], None], *, set_to_none: bool) -> None:
        """`optimizer.zero_grad()`; `clear` calls the optimizer's own."""
        self.ctx.passes.unstepped = False
        clear()

    def flush(self) -> None:
        """Wait for pending updates."""

    def before_state_dict(self) -> None:
        """The loop reads the optimizer's state."""
        self.flush()

    def before_load_state_dict(self) -> None:
        """The loop replaces the optimizer's state."""
        self.flush()

    def epoch_ended(self) -> None:
        """A pass over data with exchanges has ended, in all processes."""

    def merged(self) -> AbstractContextManager[None]:
        """The model holds the values that all workers share, without communication."""
        return nullcontext()

    def optimizer_state(self) -> dict[str, Any]:
        """The part of the optimizer's state that is equal in all processes, for a checkpoint."""
        return self.optimizer.state_dict()

    def shared_state(self) -> dict[str, Any]:
        """State of the mode's own that is equal in all processes, for a checkpoint."""
        return {}

    def worker_state(self, pass_index: int) -> dict[str, Any]:
        """State of the mode's own that belongs to a logical worker."""
        return {}

    def restore(self, shared: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> None:
        """The counterpart of `shared_state` and of `worker_state` for each pass."""

    @property
    def compressor_states(self) -> Sequence[State]:
        """The state of each logical worker's compressor."""
        return [{} for _ in self.ctx.passes.ranks]

    def restore_compressors(self, states: Sequence[State]) -> None:
        """The counterpart of `compressor_states`."""

    @property
    def layout(self) -> SavedLayout | None:
        """The order of buckets and the calibration, for a checkpoint."""
        return None

    def loop_objects(self) -> tuple[nn.Module, Optimizer]:
        """Model and optimizer for the user's loop, once everything is attached."""
        return self.model, self.optimizer

    def close(self, *, well: bool) -> None:
        """The run is over."""

    def detach(self) -> None:
        """Remove what was registered outside of model and optimizer; also after an error."""
