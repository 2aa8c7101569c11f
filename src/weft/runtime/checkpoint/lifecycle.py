"""Actions between the steps of a loop: resume an earlier attempt, save, and exit on request.

They happen when the loop requests its next batch. Everything that it does after `step()` (schedulers, averages,
`zero_grad`) is complete by then.
"""

from __future__ import annotations

import logging
import secrets
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.environment import RunOptions
from weft.errors import UserError, WeftError
from weft.ops import Spec
from weft.profile import Measured
from weft.runtime.checkpoint.state import (
    LoadedCheckpoint,
    Parts,
    check_same_job,
    check_same_optimization,
    conversions,
    expect_clearing,
    open_saved,
    restore,
    restore_followers,
    restore_position,
    restore_workers,
    untracked_schedulers,
)
from weft.runtime.checkpoint.writer import CheckpointWriter
from weft.runtime.engine.bucket_layout import SavedLayout
from weft.runtime.launch.process_groups import TERMINATED
from weft.runtime.loop.data_position import DataPosition, Epoch
from weft.runtime.loop.logical_workers import Passes
from weft.runtime.record.events import Recorder
from weft.runtime.record.files import append_line, lines_in, writing
from weft.runtime.record.phases import PhaseTimer
from weft.store.checkpoint import Policy, set_aside, sync, tidy
from weft.strategy import Strategy
from weft.transport.collective import Processes
from weft.transport.layout import Layout

log = logging.getLogger(__name__)

_SHARED_WITHIN_S = 3.0


@dataclass(kw_only=True)
class Lifecycle:
    """One process's part in saving and resuming a run."""

    strategy: Strategy
    steps: int | None
    seed: int
    folder: Path | None
    requested_policy: Policy | None
    """When to save; None: not specified, and then state that cannot be saved is not an error."""
    resume: Path | None
    """The checkpoint to resume from."""
    passes: Passes
    position: DataPosition
    transport: Processes
    phases: PhaseTimer
    timeout_s: float

    def __post_init__(self) -> None:
        self.policy = self.requested_policy or Policy()
        self.termination_requested = False
        """Whether this process was asked to terminate."""
        self.save_requested = False
        """Whether the loop has called run.save() within a step."""
        self._saving: CheckpointWriter | None = None
        self._saved: LoadedCheckpoint | None = None
        self._job: dict[str, Any] = {}
        self._known = False
        self._warned = True  # a pass before `open` has no model to train
        self.left = False
        """Whether this process exits on request, after the requested save."""

    # --- starting -----------------------------------------------------------------------------------------------------

    def open(self, parts: Parts, specs: Sequence[Spec], recorder: Recorder | None) -> SavedLayout | None:
        """Before anything is distributed: restore the state of an earlier attempt."""
        self.parts, self._warned = parts, False
        self.position.generators = parts.generators
        kinds = [[spec.name, list(spec.shape), str(spec.dtype).removeprefix("torch.")] for spec in specs]
        name = (RunOptions.from_env().job or Path()).stem
        self._job = {"name": name, "model": kinds, "optimizer": type(parts.optimizer).__name__}
        back = parts.mode.rejoined
        if self.folder is not None and self.policy.every:
            self._prepare(self.folder / "checkpoints")
        if self.resume is None or back:
            if self.folder is not None and not back:
                self._start_over(self.folder, recorder)
            return None
        saved = self._saved = open_saved(self.resume, self.transport.layout)
        check_same_job(saved, specs, parts.optimizer)
        check_same_optimization(saved, self.strategy)
        restore(parts, saved)
        restore_position(self.position, saved, self.passes)
        expect_clearing(parts.module, saved)
        self._say(saved, recorder)
        order, seen = saved.common["order"], saved.common["seen"]
        return SavedLayout(order, Measured.of(seen) if seen else None) if order else None

    def opened(self) -> None:
        """After everything is distributed: restore the workers' own state, unless an open epoch does so later."""
        if self._saving is not None and not self.parts.mode.rejoined:
            self._abandon(self._saving)
        if self._saved is not None and self._saved.common["epoch"] is None:
            restore_workers(self.parts, self._saved, self.strategy)
            self._saved = None

    def _prepare(self, root: Path) -> None:
        """Remove remains of a killed writer, and agree on a token that no earlier attempt has used."""
        layout, number = self.transport.layout, secrets.randbits(48)
        if not self.strategy.synchrony.lockstep:
            self._prepare_alone(root, f"{number:012x}")
            return
        if layout.process == 0:
            _clear(root)
            with writing(root):
                (root / f".meet-{number:012x}").touch()
        token = f"{self.transport.tell([number])[0][0]:012x}"
        here = _appears(root / f".meet-{token}")
        everywhere = all(row[0] for row in self.transport.tell([int(here)]))
        if layout.process == 0:
            (root / f".meet-{token}").unlink()
        if not everywhere:
            what = f"not every process sees {root}, so no checkpoint can be written; give a shared folder with --out"
            if self.requested_policy:
                raise UserError(what)
            log.warning("%s", what)
            return
        self._saving = CheckpointWriter(
            root, layout, self.policy, token, self.timeout_s, self.parts.mode.checkpoint_writers
        )
        self._listen()

    def _prepare_alone(self, root: Path, token: str) -> None:
        """Without lockstep worker 0 saves alone, since the others are at different steps."""
        if self.transport.layout.process == 0:
            _clear(root)
            self._saving = CheckpointWriter(root, Layout(workers=1), self.policy, token, self.timeout_s)
        self._listen()

    def _abandon(self, saving: CheckpointWriter) -> None:
        """Set aside checkpoints that are not part of this attempt's history."""
        if self._saved is not None and self._saved.folder.resolve().parent == saving.root.resolve():
            saving.go_on(self._saved.manifest.step)
        if self.transport.layout.process > 0:
            return
        with writing(saving.root):
            aside = set_aside(saving.root, saving.last)
        if aside:
            log.warning(
                "the run starts after step %d, so newer checkpoints are renamed to %s; they stay until a run in this "
                "folder next resumes from an older step",
                max(0, saving.last),
                ", ".join(str(folder) for folder in aside),
            )

    def _listen(self) -> None:
        """Handle SIGTERM: exit after saving."""
        usual = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if usual and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: Any) -> None:
        self.termination_requested = True
        self.parts.mode.request_termination()

    def _say(self, saved: LoadedCheckpoint, recorder: Recorder | None) -> None:
        """Record the resumption in the run folder and in the log."""
        for what in conversions(saved, self.transport.layout.workers, self.strategy):
            log.warning("%s", what)
        log.info("resuming after step %d, from %s", saved.manifest.step, saved.folder)
        if self.position.repeats_code():
            log.warning(
                "completed passes over data give no batch now, but the loop's code around them runs again, with the "
                "model of step %d, and may overwrite files; write the loop as `for epoch in run.epochs(N):`, which "
                "skips completed epochs",
                saved.manifest.step,
            )
        self._count(recorder, saved.manifest.step, saved.folder.name, again=True)

    def _start_over(self, folder: Path, recorder: Recorder | None) -> None:
        """A run in a folder that holds an earlier one is a new attempt, with separate events."""
        again = recorder is not None and recorder.again and self.transport.layout.process == 0
        if self.strategy.synchrony.lockstep:
            self._count(recorder, 0, None, again=again)
        elif again:  # without lockstep, workers cannot agree on the attempt
            raise UserError(f"{folder} holds the events of an earlier run; resume it, or give another with --out")

    def _count(self, recorder: Recorder | None, step: int, source: str | None, *, again: bool) -> None:
        """Agree on the number of the attempt, and record its start."""
        attempt, layout = 0, self.transport.layout
        if self.folder is not None and layout.process == 0 and again:
            attempt = lines_in(self.folder / "resumed.jsonl") + 1
            word = {"attempt": attempt, "step": step, "from": source, "processes": layout.processes}
            append_line(self.folder / "resumed.jsonl", word | {"strategy": str(self.strategy)})
        attempt = self.transport.tell([attempt])[0][0]
        if recorder is not None:
            recorder.attempt = attempt

    # --- between two steps --------------------------------------------------------------------------------------------

    def enough(self) -> bool:
        return self.steps is not None and self.passes.step >= self.steps

    def resumed(self, epoch: Epoch) -> None:
        saved = self._saved
        if saved is not None and epoch.number == saved.common["epoch"]:
            if self.parts.mode.owns_model:
                restore(self.parts, saved)
            else:  # the model is on the servers or shared, and others may have advanced it
                restore_followers(self.parts, saved)
            restore_workers(self.parts, saved, self.strategy)
            self._saved = None

    def stepped(self, epoch: Epoch) -> None:
        if not self.policy.every or (self._saving is None and not self.termination_requested):
            return
        self._look_around()
        leaving = self.parts.mode.leaving
        if leaving or self.save_requested or self.enough() or self.policy.due(self.passes.step):
            self._save(epoch)
        if leaving:
            if self._saving is not None:
                self._saving.finish()
            self.left = True
            raise SystemExit(TERMINATED)

    def untrained(self) -> None:
        if self._warned or any(p.grad is not None for p in self.parts.model.parameters()):
            return
        self._warned = True
        log.warning(
            "a pass over run.shard() ended without a backward, so nothing was trained; to evaluate, use "
            "run.evaluate(loader), which deals every sample once"
        )

    def passed(self) -> None:
        self.parts.mode.epoch_ended()

    def finish(self) -> None:
        between_steps = self.passes.step and not self.passes.pass_index and not self.left
        if between_steps and self.parts.mode.finish() and self._saving is not None:
            self._saving.model_changed()

    def _look_around(self) -> None:
        """Check that all schedulers are known; a checkpoint without one of them would be wrong."""
        stranger = untracked_schedulers(self.parts) if not self._known else None
        self._known = True
        if stranger is None:
            return
        what = f"a {stranger} was not passed to run.distribute(), and they would miss its state"
        remedy = "write model, optimizer, scheduler = run.distribute(model, optimizer, scheduler)"
        if self.requested_policy:
            raise UserError(f"checkpoints are not possible: {what}; {remedy}, or turn them off with --save-every 0")
        log.warning("checkpoints are off: %s; %s", what, remedy)
        self.policy = Policy(every=0)
        if signal.getsignal(signal.SIGTERM) == self._ask:  # there is nothing to save before an exit
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def save(self) -> None:
        """Save the run now or, within a step, after that step. A collective call."""
        if self.position.within(self.passes.step):
            self.save_requested = True
        else:
            self._save(None)

    def _save(self, epoch: Epoch | None) -> None:
        if self._saving is None:
            return
        self._look_around()
        self.save_requested = False
        if not self.policy.every or self._saving.last == self.passes.step:
            return
        epoch = epoch or next((each for each in reversed(self.position.epochs) if not each.over), None)
        self.parts.mode.settle()
        if self.phases.recorder is not None:
            self.phases.recorder.flush()  # a run that resumes from here has its history
        about = {"workers": self.passes.workers, "strategy": str(self.strategy), "seed": self.seed, "job": self._job}
        self.phases.saved(self._saving.save(self.parts, epoch, about))

    def close(self, *, well: bool) -> None:
        """End the run. If it ended well, its last state is saved."""
        if self._saving is None:
            return
        if well and self.passes.step > 0 and self.passes.pass_index == 0 and self._saved is None:
            self._save(None)
            self._saving.finish()
            return
        try:
            self._saving.finish()
        except WeftError as error:  # the run has failed already, with an error that takes precedence
            log.warning("%s", error)


def _clear(root: Path) -> None:
    """Make the folder of checkpoints, durably, and remove remains of a killed writer."""
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        tidy(root)
        for folder in (root, root.parent, root.absolute().parent.parent):
            with suppress(PermissionError):
                sync(folder)


def _appears(path: Path) -> bool:
    """Whether a file appears within a short time; file systems of other machines have a delay."""
    until = time.monotonic() + _SHARED_WITHIN_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return path.exists()


def policy_here(every: int | None) -> Policy | None:
    """The policy of the environment or the call; None if neither specifies one."""
    env = RunOptions.from_env()
    chosen = every if env.save_every is None else env.save_every
    keep = {"last": env.keep_last, "milestone": env.keep_every}
    return None if chosen is None else Policy(every=chosen, **{k: v for k, v in keep.items() if v is not None})
