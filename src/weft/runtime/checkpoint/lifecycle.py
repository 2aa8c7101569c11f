"""What a run does between a loop's steps: go on where an earlier part of it stopped, save, and leave when asked to.

Between two steps means: when the loop asks for its next batch. Whatever it does after `step()` (schedulers, averages,
`zero_grad`) has happened by then.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import UserError, WeftError
from weft.ops import Spec
from weft.profile import Measured
from weft.runtime.checkpoint.state import (
    CheckpointWriter,
    LoadedCheckpoint,
    Parts,
    check_same_job,
    conversions,
    expect_clearing,
    open_saved,
    restore,
    restore_followers,
    restore_position,
    restore_workers,
    untracked_schedulers,
)
from weft.runtime.launch.process_groups import TERMINATED
from weft.runtime.loop.data_position import DataPosition, Epoch
from weft.runtime.loop.logical_workers import Passes
from weft.runtime.modes.all_reduce import ResumedLayout
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
    """One process's part in saving a run and going on with it."""

    strategy: Strategy
    steps: int | None
    seed: int
    folder: Path | None
    asked_for: Policy | None
    """When to save; None: nobody said, and what cannot be saved is no reason to stop."""
    resume: Path | None
    """A checkpoint to go on from."""
    passes: Passes
    position: DataPosition
    transport: Processes
    phases: PhaseTimer
    timeout_s: float
    settle: Callable[[], None]
    """Waits until the last step is whole, and refuses to go on from one that is not finite."""

    def __post_init__(self) -> None:
        self.policy = self.asked_for or Policy()
        self.asked = False
        """Whether this process was asked to leave."""
        self.wanted = False
        """Whether the loop has asked for a save within a step."""
        self._saving: CheckpointWriter | None = None
        self._saved: LoadedCheckpoint | None = None
        self._job: dict[str, Any] = {}
        self._known = False
        self.left = False
        """Whether this process leaves because it was asked to, and what it was asked to save is saved."""

    # --- starting -----------------------------------------------------------------------------------------------------

    def open(self, parts: Parts, specs: Sequence[Spec], recorder: Recorder | None) -> ResumedLayout | None:
        """Before anything is distributed: what an earlier part of the run left, put back."""
        self.parts = parts
        self.position.generators = parts.generators
        kinds = [[spec.name, list(spec.shape), str(spec.dtype).removeprefix("torch.")] for spec in specs]
        name = Path(os.environ.get("WEFT_JOB", "")).stem
        self._job = {"name": name, "model": kinds, "optimizer": type(parts.optimizer).__name__}
        back = parts.served is not None and parts.served.running  # a worker that was lost: the run has gone on since
        if self.folder is not None and self.policy.every:
            self._prepare(self.folder / "checkpoints")
        if self.resume is None or back:
            if self.folder is not None and not back:
                self._start_over(self.folder, recorder)
            return None
        saved = self._saved = open_saved(self.resume, self.transport.layout)
        check_same_job(saved, specs, parts.optimizer)
        restore(parts, saved)
        restore_position(self.position, saved, self.passes)
        expect_clearing(parts.module, saved)
        self._say(saved, recorder)
        order, seen = saved.common["order"], saved.common["seen"]
        return ResumedLayout(order, Measured.of(seen) if seen else None) if order else None

    def opened(self) -> None:
        """Everything is distributed: the workers' own state, unless the loop comes past an open epoch first."""
        if self._saving is not None and not (self.parts.served and self.parts.served.running):
            self._abandon(self._saving)
        if self._saved is not None and self._saved.common["epoch"] is None:
            restore_workers(self.parts, self._saved, self.strategy)
            self._saved = None

    def _prepare(self, root: Path) -> None:
        """Clear what a killed writer left, and agree on a name that nothing of an earlier part of the run has."""
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
            what = f"not every process sees {root}, so nothing can be saved; give a folder on a shared disk with --out"
            if self.asked_for:
                raise UserError(what)
            log.warning("%s", what)
            return
        self._saving = CheckpointWriter(
            root, layout, self.policy, token, self.timeout_s, 1 if self.parts.served else None
        )
        self._listen()

    def _prepare_alone(self, root: Path, token: str) -> None:
        """Where workers are at different steps worker 0 saves, alone: the others would have to be waited for."""
        if self.transport.layout.process == 0:
            _clear(root)
            self._saving = CheckpointWriter(root, Layout(workers=1), self.policy, token, self.timeout_s)
        self._listen()

    def _abandon(self, saving: CheckpointWriter) -> None:
        """Set aside checkpoints that do not lead to where this part of the run starts."""
        if self._saved is not None and self._saved.folder.resolve().parent == saving.root.resolve():
            saving.go_on(self._saved.manifest.step)
        if self.transport.layout.process > 0:
            return
        with writing(saving.root):
            aside = set_aside(saving.root, saving.last)
        if aside:
            log.warning(
                "the run starts after step %d, so newer checkpoints are set aside as %s; they stay until a run in this "
                "folder next goes back",
                max(0, saving.last),
                ", ".join(str(folder) for folder in aside),
            )

    def _listen(self) -> None:
        """SIGTERM asks this process to leave, once it has saved."""
        usual = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if usual and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True
        if self.parts.gradients is not None:
            self.parts.gradients.status.termination_requested = True
        if self.parts.served is not None:
            self.parts.served.asked = True

    def _say(self, saved: LoadedCheckpoint, recorder: Recorder | None) -> None:
        """Leave word of it in the run folder, and on the terminal."""
        for what in conversions(saved, self.transport.layout.workers, self.strategy):
            log.warning("%s", what)
        log.info("going on after step %d, from %s", saved.manifest.step, saved.folder)
        self._count(recorder, saved.manifest.step, saved.folder.name, again=True)

    def _start_over(self, folder: Path, recorder: Recorder | None) -> None:
        """A run in a folder that holds an earlier one is another attempt, whose events are told apart."""
        again = recorder is not None and recorder.again and self.transport.layout.process == 0
        if self.strategy.synchrony.lockstep:
            self._count(recorder, 0, None, again=again)
        elif again:  # workers do not wait for each other here, so that none can tell the others
            raise UserError(f"{folder} holds the events of an earlier run; resume that one, or give another with --out")

    def _count(self, recorder: Recorder | None, step: int, source: str | None, *, again: bool) -> None:
        """Agree on the attempt's number, and leave word of its beginning."""
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
            if self.strategy.synchrony.lockstep and self.parts.served is None:
                restore(self.parts, saved)
            else:  # the model is the servers', or everyone's, and others may have gone on with it
                restore_followers(self.parts, saved)
            restore_workers(self.parts, saved, self.strategy)
            self._saved = None

    def stepped(self, epoch: Epoch) -> None:
        if not self.policy.every or (self._saving is None and not self.asked):
            return
        self._look_around()
        gradients, served = self.parts.gradients, self.parts.served
        leaving = gradients.status.leaving if gradients else served.leaving if served else self.asked
        if leaving or self.wanted or self.enough() or self.policy.due(self.passes.step):
            self._save(epoch)
        if leaving:
            if self._saving is not None:
                self._saving.finish()
            self.left = True
            raise SystemExit(TERMINATED)

    def passed(self) -> None:
        if self.parts.gradients is not None:
            self.parts.gradients.compare_steps()

    def _look_around(self) -> None:
        """Whether all that steps along is known; a checkpoint that misses something would be a wrong one."""
        stranger = untracked_schedulers(self.parts) if not self._known else None
        self._known = True
        if stranger is None:
            return
        what = (
            f"a {stranger} steps along that the run does not know, and a checkpoint would miss it; pass it along: "
            "model, optimizer, it = run.distribute(model, optimizer, it)"
        )
        if self.asked_for:
            raise UserError(f"{what}, or say --save-every 0")
        log.warning("%s. No checkpoints until then", what)
        self.policy = Policy(every=0)

    def save(self) -> None:
        """The loop wants the run to be saved: now, or within a step when that one is over; all processes alike."""
        if self.position.within(self.passes.step):
            self.wanted = True
        else:
            self._save(None)

    def _save(self, epoch: Epoch | None) -> None:
        if self._saving is None:
            return
        self._look_around()
        self.wanted = False
        if not self.policy.every or self._saving.last == self.passes.step:
            return
        epoch = epoch or next((each for each in reversed(self.position.epochs) if not each.over), None)
        self.settle()
        if self.phases.recorder is not None:
            self.phases.recorder.flush()  # what goes on from here has its history
        about = {"workers": self.passes.workers, "strategy": str(self.strategy), "seed": self.seed, "job": self._job}
        self.phases.saved(self._saving.save(self.parts, epoch, about))

    def close(self, *, well: bool) -> None:
        """The end of the run: where it ended well, its last state is kept."""
        if self._saving is None:
            return
        if well and self.passes.step > 0 and self.passes.pass_index == 0 and self._saved is None:
            self._save(None)
            self._saving.finish()
            return
        try:
            self._saving.finish()
        except WeftError as error:  # the run has failed before, and that is what it ends with
            log.warning("%s", error)


def _clear(root: Path) -> None:
    """A folder for checkpoints, that lasts, without what a killed writer left."""
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        tidy(root)
        for folder in (root, root.parent, root.absolute().parent.parent):
            with suppress(PermissionError):
                sync(folder)


def _appears(path: Path) -> bool:
    """Whether a file is there, or will be soon: disks of other machines take a moment."""
    until = time.monotonic() + _SHARED_WITHIN_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return path.exists()


def policy_here(every: int | None) -> Policy | None:
    """What the environment says, or the call; None: nobody said anything."""
    env = os.environ
    try:
        chosen = int(env["WEFT_SAVE_EVERY"]) if "WEFT_SAVE_EVERY" in env else every
        keep = {"last": int(env.get("WEFT_KEEP_LAST", 2)), "milestone": int(env.get("WEFT_KEEP_EVERY", 0))}
    except ValueError as error:
        raise UserError(f"WEFT_SAVE_EVERY, WEFT_KEEP_LAST or WEFT_KEEP_EVERY is not a whole number: {error}") from None
    return None if chosen is None else Policy(every=chosen, **keep)
