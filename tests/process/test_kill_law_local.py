"""The kill law of local optimizers: killed between or during merges and resumed, a run is the uninterrupted run.

On any number of processes, too.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import random
import tempfile
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import weft
from tests.process.faults import MERGE, Faults
from tests.process.harness import TIMEOUT_S, spawn, start
from tests.process.replicas import WORKERS, digest, model_with_dice
from tests.process.test_kill_law import Noisy
from weft.runtime.checks import replicas
from weft.store.checkpoint import found_in, newest

STEPS, EVERY = 10, 2
ANSWERS = {
    "average(every=3)": (3, 6, 9),
    "post_local(every=4, switch_at=3)": (3, 4, 8),
    "block_momentum(every=3)": (3, 6, 9),
    "sma(every=2)": (4, 6, 8),
    "outer(every=3)": (3, 6, 9),
    "streaming(every=4, fragments=2, delay=3, mix=0.25)": (4, 6, 8),
}
"""Each answer, and some steps after which it merges."""
COMPRESSIONS = ("int8(block=64)", "error_feedback(topk(ratio=0.1))")
PLACES = ("forward", "backward", MERGE)


def job(folder: str, attempt: int) -> str:
    """Train to the end, noting every batch and loss on the way; returns a hash of the final state."""
    replicas.HASH_EVERY = 3
    run = weft.init(out=folder, steps=STEPS, seed=3)
    model: Any = model_with_dice()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    model, optimizer, scheduler = run.distribute(model, optimizer, scheduler)
    Faults.here().attach(run, model, optimizer)
    loader = DataLoader(Noisy(6 * WORKERS * 5), batch_size=6, shuffle=True)
    notes = os.open(f"{folder}/notes-{attempt}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for x, y in run.shard(loader, epochs=None):  # an epoch has five steps
        with run.merged():
            note = [run.step + 1, run.rank, digest(model.state_dict())]
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        os.write(notes, (json.dumps([*note, loss.item().hex(), digest(x)]) + "\n").encode())
    final = f"{digest(model.state_dict())} {optimizer.param_groups[0]['lr'].hex()}"
    run.close()
    return final


def strike(processes: int, *args: Any, **env: str) -> None:
    """Start a run with faults, and end all of its processes when one is killed, as a launcher does."""
    with tempfile.TemporaryDirectory() as folder:
        children = start(Path(folder), processes, job, *args, workers=WORKERS, **env)
        try:
            while alive := [child.sentinel for child, _ in children if child.is_alive()]:
                assert connection.wait(alive, TIMEOUT_S), "the run hangs"
                if any(child.exitcode for child, _ in children):
                    break
        finally:
            for child, _ in children:
                child.kill()
                child.join()
        outcomes = [pickle.loads(answer.read_bytes())[0] for _, answer in children if answer.exists()]
        assert "value" not in outcomes, "the fault has ended nothing"


class Story:
    """One run, with its ends and new beginnings."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self.attempt = folder, 0

    def go(self, strategy: str, processes: int = WORKERS, faults: Faults | None = None) -> str | None:
        """Start or resume; returns the final state, or None where a fault has ended it."""
        env = {"WEFT_STRATEGY": strategy, "WEFT_SAVE_EVERY": str(EVERY), **(faults or Faults()).env}
        if found_in(self.folder / "checkpoints"):
            env["WEFT_RESUME"] = str(newest(self.folder / "checkpoints")[0])
        self.attempt += 1
        args = str(self.folder), self.attempt
        if faults is not None:
            strike(processes, *args, **env)
            return None
        finals = spawn(processes, job, *args, workers=WORKERS, **env)
        assert len(set(finals)) == 1
        return str(finals[0])

    def notes(self) -> dict[tuple[int, int], list[str]]:
        """By step and rank: the anchor, the loss and the batch. A step that was repeated must have given the same."""
        known: dict[tuple[int, int], list[str]] = {}
        for file in sorted(self.folder.glob("notes-*")):
            for line in file.read_text().splitlines():
                step, rank, *found = json.loads(line)
                assert known.setdefault((step, rank), found) == found, f"step {step} of worker {rank}"
        return known


@functools.cache
def uninterrupted(strategy: str, scratch: Path) -> tuple[str, dict[Any, Any]]:
    story = Story(scratch / str(abs(hash(strategy))))
    final, notes = story.go(strategy), story.notes()
    assert final is not None and set(notes) == set(itertools.product(range(1, STEPS + 1), range(WORKERS)))
    anchors = {step: {notes[step, rank][0] for rank in range(WORKERS)} for step in range(1, STEPS + 1)}
    assert all(len(each) == 1 for each in anchors.values()), "anchors differ between workers"
    return final, notes


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted")


def killed(place: str, merges: tuple[int, ...], dice: random.Random, after: int = 3) -> Faults:
    """During a merge, or in another step; not before the first save."""
    steps = [step for step in range(after, STEPS) if (step in merges) == (place == MERGE)]
    return Faults().kill(rank=dice.randrange(WORKERS), at_step=dice.choice(steps), point=place)


PAIRS = itertools.product(ANSWERS, COMPRESSIONS)
SELECTION = [(*pair, PLACES[at % 3], (4, 3, 1)[at // 3 % 3]) for at, pair in enumerate(PAIRS)]
"""Every answer with every compressor, and every place with every number of processes."""
PRODUCT = itertools.product(ANSWERS, COMPRESSIONS, PLACES, (4, 3, 1))


def test_the_selection_covers_every_place_on_every_number_of_processes() -> None:
    assert {(place, processes) for *_, place, processes in SELECTION} == set(itertools.product(PLACES, (4, 3, 1)))


@pytest.mark.parametrize(
    ("answer", "compression", "place", "processes"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in SELECTION)) for case in PRODUCT],
)
def test_killed_and_resumed_is_the_same_run(
    answer: str, compression: str, place: str, processes: int, tmp_path: Path, scratch: Path
) -> None:
    strategy = f"{answer} / bsp / direct / {compression}"
    dice = random.Random(f"{strategy} {place} {processes}")
    story = Story(tmp_path / "run")
    assert story.go(strategy, faults=killed(place, ANSWERS[answer], dice)) is None
    final, notes = uninterrupted(strategy, scratch)
    assert story.go(strategy, processes) == final and story.notes() == notes


@pytest.mark.parametrize("answer", ["average(every=3)", "streaming(every=4, fragments=2, delay=3, mix=0.25)"])
def test_a_run_that_is_asked_to_terminate_leaves_after_a_merge(answer: str, tmp_path: Path, scratch: Path) -> None:
    strategy = f"{answer} / bsp / direct / {COMPRESSIONS[0]}"
    story = Story(tmp_path / "run")
    assert story.go(strategy, faults=Faults().terminate(rank=1, at_step=5)) is None
    left_at = int(found_in(story.folder / "checkpoints")[0].name[5:])
    assert left_at in range(5, STEPS) and len(story.notes()) == left_at * WORKERS
    final, notes = uninterrupted(strategy, scratch)
    assert story.go(strategy, 3) == final and story.notes() == notes


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_many_kills(tmp_path: Path, scratch: Path, part: int) -> None:
    """Five runs each, three kills a run, on one to four processes."""
    dice = random.Random(part)
    for number in range(5):
        answer = dice.choice(list(ANSWERS))
        strategy = f"{answer} / bsp / direct / {dice.choice(COMPRESSIONS)}"
        story = Story(tmp_path / str(number))
        for _ in range(3):
            saved = found_in(story.folder / "checkpoints")
            after = min(int(saved[0].name[5:]) + 1 if saved else 2, STEPS - 1)
            fault = killed(dice.choice(("forward", "backward")), (), dice, after)
            assert story.go(strategy, dice.randint(1, WORKERS), fault) is None
        final, notes = uninterrupted(strategy, scratch)
        assert story.go(strategy, dice.randint(1, WORKERS)) == final and story.notes() == notes
