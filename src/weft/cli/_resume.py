"""Resuming a run: `weft train --resume RUN`."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from rich.console import Console

from weft import jobs
from weft.errors import UserError
from weft.runtime.launch.launcher import find_job
from weft.runtime.launch.spec import Launch
from weft.runtime.launch.supervise import Terminated
from weft.runtime.record.describe import has_finished, launched
from weft.runtime.record.files import hold, writing
from weft.runtime.record.run_folder import stream
from weft.store.checkpoint import found_in, newest, recover, step_of, verify
from weft.strategy import Strategy


def hold_launch(folder: Path) -> IO[bytes]:
    """Lock a run folder, so that a running run cannot be resumed at the same time."""
    with writing(folder):
        return hold(folder, "launch")


def hold_for_resume(resume: Path) -> IO[bytes]:
    """Lock a run that is to be resumed, and recover a checkpoint that was being replaced."""
    run = _run_of(resume)
    launched(run)
    held = hold_launch(run)
    try:
        with writing(run), hold(run, "run"):
            recover(run / "checkpoints")
    except BaseException:
        held.close()
        raise
    return held


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A run that is resumed from its latest complete checkpoint."""

    launch: Launch
    """The same run; options on the command line take precedence."""
    run: Path
    """Its folder."""
    step: int
    """The step of the checkpoint."""
    finished: bool
    """Whether the run has reached its end, and no further steps are given."""
    refused: tuple[str, ...]
    """The faults of newer checkpoints."""

    @classmethod
    def of(cls, given: Launch, resume: Path, workers: int | None) -> Resumption:
        """`resume` is a run folder or one of its checkpoints."""
        run = _run_of(resume)
        before = launched(run)
        path = find_job(before.job)
        if given.job and find_job(given.job).resolve() != path.resolve():
            raise UserError(f"{run} is a run of {before.job}, not of {given.job}; omit the job, or start a new run")
        if not given.job:
            _check_trusted(before.job, path, run)
        if run == resume:
            checkpoint, manifest, refused = newest(run / "checkpoints")
        else:
            checkpoint, manifest, refused = resume, verify(resume), []
        launch = replace(
            given,
            job=before.job,
            args=given.args or before.args,
            workers=workers or before.workers,
            processes=before.processes if given.processes is None and not workers else given.processes,
            strategy=given.strategy or Strategy.parse(manifest.strategy),
            strategy_source=given.strategy_source if given.strategy else f"the checkpoint of {run}",
            steps=given.steps if given.steps is not None else before.steps,
            seed=before.seed if given.seed is None else given.seed,
            device=given.device if given.device != "auto" else before.device,
            share_gpus=given.share_gpus or before.share_gpus,
            policy=given.policy or before.policy,
            out=run,
            resume=checkpoint.absolute(),
        )
        finished = run == resume and not given.args and has_finished(run) and manifest.step >= _end(run, given)
        return cls(launch=launch, run=run, step=manifest.step, finished=finished, refused=tuple(refused))

    def announce(self, show: Console) -> None:
        """What is resumed, and which job that runs."""
        for reason in self.refused:
            show.print(f"{reason}; it is skipped", markup=False)
        show.print(f"resuming after step {self.step}, from {self.launch.resume}", markup=False)
        show.print(f"the job is {' '.join([str(find_job(self.launch.job)), *self.launch.args])}", markup=False)
        if self.launch.steps is not None and self.step >= self.launch.steps:
            show.print(f"all {self.launch.steps} steps are done; give a larger --steps to train on", markup=False)


def _end(run: Path, given: Launch) -> int:
    """The step at which the run is to end: the given one, or the last one that it has taken."""
    return given.steps if given.steps is not None else max((event["step"] for event in stream(run)), default=0)


def stopped(folder: Path, error: Terminated) -> str:
    """What is saved of a run that was stopped, and how to resume it."""
    saved = next(iter(found_in(folder / "checkpoints")), None)
    if saved is None:
        return "stopped; nothing was saved"
    resume = f"resume with `weft train --resume {shlex.quote(str(folder))}`"
    if error.saved:
        return f"stopped at step {step_of(saved)}; saved in {saved}; {resume}"
    return f"stopped; {error}; step {step_of(saved)} is saved in {saved}; {resume}"


def _run_of(resume: Path) -> Path:
    """The run folder, given it or one of its checkpoints."""
    if not resume.exists():
        raise UserError(
            f"--resume {resume} does not exist; give a run folder, as in runs/NAME, or one of its checkpoints"
        )
    return resume.absolute().parent.parent if (resume / "manifest.json").exists() else resume


def _check_trusted(job: str, path: Path, run: Path) -> None:
    """Refuse to run a script that only the run folder names and that another user may have put there."""
    inside = path.resolve().is_relative_to(run.resolve())
    if jobs.path(job) is None and (inside or path.stat().st_uid != os.geteuid()):
        why = "lies in the run folder" if inside else "belongs to another user"
        raise UserError(
            f"{run / 'launch.json'} names the job {path}, which {why}; if you trust it, name it yourself: "
            f"weft train {path} --resume {run}"
        )
