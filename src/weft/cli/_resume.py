"""Resuming a run: `weft train --resume RUN`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import IO

from rich.console import Console

from weft import jobs
from weft.errors import UserError
from weft.runtime.launch.launcher import find_job
from weft.runtime.launch.spec import Launch
from weft.runtime.record.describe import launched
from weft.runtime.record.files import hold, writing
from weft.store.checkpoint import newest, recover, verify
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


def resumed(given: Launch, resume: Path, workers: int | None, show: Console) -> Launch:
    """The same run, resumed from its latest complete checkpoint; options on the command line take precedence."""
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
    args = given.args or before.args
    for reason in refused:
        show.print(f"{reason}; it is skipped", markup=False)
    show.print(f"resuming after step {manifest.step}, from {checkpoint}", markup=False)
    show.print(f"the job is {' '.join([str(path), *args])}", markup=False)
    steps = given.steps if given.steps is not None else before.steps
    if steps is not None and manifest.step >= steps:
        show.print(f"all {steps} steps are done; give a larger --steps to train on", markup=False)
    return replace(
        given,
        job=before.job,
        args=args,
        workers=workers or before.workers,
        processes=before.processes if given.processes is None and not workers else given.processes,
        strategy=given.strategy or Strategy.parse(manifest.strategy),
        steps=steps,
        seed=before.seed if given.seed is None else given.seed,
        device=given.device if given.device != "auto" else before.device,
        share_gpus=given.share_gpus or before.share_gpus,
        policy=given.policy or before.policy,
        out=run,
        resume=checkpoint.absolute(),
    )


def _run_of(resume: Path) -> Path:
    """The run folder, given it or one of its checkpoints."""
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
