"""Whatever is saved, killed, damaged or gone back from, the newest whole checkpoint survives."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.errors import UserError
from weft.runtime.checkpoint.writer import CheckpointWriter, Share
from weft.store import checkpoint
from weft.store.checkpoint import Manifest, Policy
from weft.transport.layout import Layout

HISTORIES_IN_CI = 100


# --- histories --------------------------------------------------------------------------------------------------------
_TOUCHES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def killed(act: Callable[[], Any], number: int) -> bool:
    """Run `act` in a process that is killed before it touches a file for the `number`-th time; was it killed?"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of this process: what is done needs none of them
        child = os.fork()
    if child == 0:
        touches = itertools.count(1)

        def hook(event: str, _: Any) -> None:
            if event in _TOUCHES and next(touches) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(hook)
            act()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


class History:
    """One run folder: saves, kills within a save or a start, damage; starts from the newest, an older one, or anew."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.dice = root, random.Random(seed)
        self.policy = Policy(last=self.dice.randint(1, 3), milestone=self.dice.choice((0, 0, 8)))
        self.tags: dict[int, str] = {}
        """What was saved on the way to where the run is: by step, a name that no other save has."""
        self.damaged: set[str] = set()
        self.residual: list[int] = []
        """Steps that this attempt has saved or gone on from: of these the latest must be there."""
        self.count = 0
        self.start(None)

    def start(self, after: Path | None) -> None:
        """What a run does when it starts, as `runtime/between` does it."""
        saving = CheckpointWriter(self.root, Layout(workers=1), self.policy, f"{self.count:012x}", 1.0)
        if after is not None:
            saving.go_on(checkpoint.step_of(after))
        self.saving, self.step = saving, max(0, saving.last)

        def begin() -> None:
            checkpoint.tidy(self.root)
            checkpoint.set_aside(self.root, saving.last)

        if self.dice.random() < 0.2:
            killed(begin, self.dice.randint(1, 12))
        begin()
        self.tags = {step: tag for step, tag in self.tags.items() if step <= saving.last}
        self.residual = [step for step in (saving.last,) if step >= 0]

    def save(self) -> None:
        """A new checkpoint, or the latest one again; now and then its writer is killed."""
        again = self.step > 0 and self.dice.random() < 0.2
        self.step += 0 if again else self.dice.randint(1, 4)
        self.count += 1
        tag = f"save {self.count}"
        about: dict[str, Any] = {"workers": 1, "strategy": "", "seed": 0, "job": {"tag": tag}}
        manifest = Manifest(step=self.step, state={"w": {"tensor": "model/w"}}, files={}, **about)
        files = {"model-0-of-1.safetensors": {"w": torch.ones(2)}}
        share = Share(files=files, own={}, common={}, view="", trained={"w"})
        if again or self.dice.random() < 0.3:
            dead = killed(lambda: self.saving._write(share, manifest), self.dice.randint(1, 30))
        else:
            self.saving._write(share, manifest)
            dead = False
        assert self.saving._error is None
        checkpoint.recover(self.root)
        if f'"{tag}"' in self.text_of(self.step):
            self.tags[self.step] = tag
            self.residual = [step for step in self.residual if step != self.step] + [self.step]
        if dead:
            self.resume()
            return
        self.saving._whole.add(self.step)
        assert checkpoint.newest(self.root)[1].job == {"tag": tag}

    def text_of(self, step: int) -> str:
        file = self.root / f"step-{step:08d}/manifest.json"
        return file.read_text() if file.exists() else ""

    def resume(self) -> None:
        """From the newest whole one, as `--resume RUN` does."""
        checkpoint.recover(self.root)
        whole = [step for step in self.residual[-self.policy.last :] if self.tags[step] not in self.damaged]
        try:
            folder, manifest, _ = checkpoint.newest(self.root)
        except UserError:
            assert not whole
            self.start(None)
            return
        assert manifest.job == {"tag": self.tags[manifest.step]}
        assert manifest.step >= max(whole, default=0)
        self.start(folder)

    def go_back(self) -> None:
        folders = [folder for folder in checkpoint.found_in(self.root) if self.is_whole(folder)]
        self.start(self.dice.choice(folders) if folders else None)

    def damage(self) -> None:
        """A file of one checkpoint is cut or removed; a checkpoint may be hit again, until nothing of it is left."""
        files = [file for folder in checkpoint.found_in(self.root) for file in sorted(folder.iterdir())]
        if files:
            file = self.dice.choice(files)
            self.damaged.add(self.tags[checkpoint.step_of(file.parent)])
            os.truncate(file, file.stat().st_size - 1) if self.dice.random() < 0.5 else file.unlink()

    def is_whole(self, folder: Path) -> bool:
        return self.tags[checkpoint.step_of(folder)] not in self.damaged

    def check(self) -> None:
        """The latest that are to be kept are there, and none is from a history that was left."""
        there = {checkpoint.step_of(folder): folder for folder in checkpoint.found_in(self.root)}
        assert set(self.residual[-self.policy.last :]) <= set(there)
        for step, folder in there.items():
            if self.is_whole(folder):
                assert checkpoint.verify(folder).job == {"tag": self.tags[step]}
        bound = self.policy.last + 1 + (self.step // self.policy.milestone if self.policy.milestone else 0)
        assert len(there) <= 2 * bound and not list(self.root.glob(".part-*"))


def live(root: Path, seed: int) -> None:
    history = History(root, seed)
    acts = [history.save] * 6 + [history.damage] * 2 + [history.resume, history.go_back, lambda: history.start(None)]
    for _ in range(10):
        history.dice.choice(acts)()
        history.check()
    history.resume()


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("part", [pytest.param(p, marks=[pytest.mark.slow] * (p > 0)) for p in range(10)])
def test_the_newest_whole_checkpoint_survives_every_history(in_memory: Path, part: int) -> None:
    for seed in range(part * HISTORIES_IN_CI, (part + 1) * HISTORIES_IN_CI):
        root = in_memory / str(seed)
        root.mkdir()
        live(root, seed)
