"""`run.epochs`: a resumed run skips completed epochs with their code, so that files and printed lines stay true."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import weft
from tests.process.harness import ChildError, spawn
from weft.store.checkpoint import newest

EPOCHS, STEPS = 3, 4
"""Epochs, and steps in each."""


class Sums:
    """A follower that keeps the sums of an epoch in checkpoints."""

    def __init__(self) -> None:
        self.loss, self.count = 0.0, 0

    def add(self, loss: float) -> None:
        self.loss, self.count = self.loss + loss, self.count + 1

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Killed(Exception):
    pass


class Counting(Sampler[int]):
    """An order for each of its epochs, which it counts."""

    def __init__(self, size: int) -> None:
        self.epoch, self.size = 0, size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def train(folder: str, out: str, kill: tuple[int, str] | None, steps: int | None = None) -> list[str]:
    """Epochs with a file each, metrics, a scheduler and an evaluation; returns what the main process prints."""
    run = weft.init(out=folder, steps=steps, save_every=1)
    said: list[str] = []

    def point(where: str) -> None:
        if kill == (run.step, where):
            raise Killed

    x = torch.linspace(-1, 1, 8 * STEPS * run.workers).view(-1, 1)
    data = TensorDataset(x, x**2)
    model: Any = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    sums = Sums()
    model, optimizer, scheduler, sums = run.distribute(model, optimizer, scheduler, sums)
    loader, held_out = DataLoader(data, batch_size=8, sampler=Counting(len(data))), DataLoader(data, batch_size=5)
    try:
        for epoch in run.epochs(EPOCHS):
            sums.loss, sums.count = 0.0, 0
            for inputs, targets in run.shard(loader):
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                point("backward")
                optimizer.step()
                optimizer.zero_grad()
                sums.add(loss.item())
                point("step")
            model.eval()
            with torch.no_grad():
                losses = [nn.functional.mse_loss(model(a), b, reduction="sum") for a, b in run.evaluate(held_out)]
            model.train()
            total = run.sum(loss=sums.loss, count=sums.count, held_out=sum(losses))
            line = f"{epoch} {total['loss'] / total['count']!r} {total['held_out']!r} {scheduler.get_last_lr()!r}"
            scheduler.step()
            if run.is_main:
                said.append(line)
                Path(out, f"epoch-{epoch}").write_bytes(
                    b"".join(p.detach().numpy().tobytes() for p in model.parameters())
                )
            point("file")
    except Killed:
        run.close(well=False)
        return said
    run.close()
    return said


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


KILLS = [(0, "backward"), (1, "step"), (3, "backward"), (4, "step"), (4, "file"), (5, "step"), (8, "step"), (8, "file")]
KILLS += [(9, "backward"), (11, "step"), (12, "step"), (12, "file")]


@pytest.mark.parametrize(("processes", "workers"), [(1, 1), (2, 2), (1, 2)])
def test_a_killed_run_leaves_the_files_and_lines_of_an_uninterrupted_one(
    tmp_path: Path, processes: int, workers: int
) -> None:
    (whole := tmp_path / "whole").mkdir()
    lines = spawn(processes, train, str(tmp_path / "run"), str(whole), None, workers=workers)[0]
    assert len(lines) == EPOCHS
    for kill in KILLS if processes > 1 else KILLS[1::3]:
        (mine := tmp_path / f"files-{kill}").mkdir()
        folder = tmp_path / f"run-{kill}"
        said = spawn(processes, train, str(folder), str(mine), kill, workers=workers)[0]
        found = list((folder / "checkpoints").glob("step-*"))
        env = {"WEFT_RESUME": str(newest(folder / "checkpoints")[0])} if found else {}
        folder = folder if found else tmp_path / f"again-{kill}"
        said += spawn(processes, train, str(folder), str(mine), None, workers=workers, **env)[0]
        assert list(dict.fromkeys(said)) == lines, kill
        assert files(mine) == files(whole), kill


def test_steps_end_the_loop_and_a_resumed_run_completes_the_epoch(tmp_path: Path) -> None:
    (whole := tmp_path / "whole").mkdir()
    (mine := tmp_path / "mine").mkdir()
    spawn(1, train, str(tmp_path / "run"), str(whole), None)
    said = spawn(1, train, str(tmp_path / "part"), str(mine), None, 6)[0]
    assert sorted(files(mine)) == ["epoch-0", "epoch-1"], "the body of a cut epoch runs to its end, and no other begins"
    checkpoint = str(newest(tmp_path / "part/checkpoints")[0])
    again = spawn(1, train, str(tmp_path / "part"), str(mine), None, 6, WEFT_RESUME=checkpoint)[0]
    assert again == said[1:], "the body that was cut runs again, with the state it had"
    spawn(1, train, str(tmp_path / "part"), str(mine), None, 12, WEFT_RESUME=checkpoint)
    assert files(mine) == files(whole)


def nested(folder: str) -> None:
    run = weft.init()
    for _ in run.epochs(2):
        for _ in run.epochs(2):
            pass


def test_nested_loops_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="use range\\(\\) for the inner loop"):
        spawn(1, nested, "", fresh=True)


def plain_loop(folder: str, steps: int) -> list[str]:
    """Two passes without `run.epochs`; returns the warnings."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft").addHandler(handler)
    run = weft.init(out=folder, steps=steps, save_every=1)
    model: Any = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    run.distribute(model, optimizer)
    for _ in range(2):
        for (x,) in run.shard(DataLoader(TensorDataset(torch.ones(3, 1)), batch_size=1)):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    logging.getLogger("weft").removeHandler(handler)
    return [text for text in heard if "run.epochs" in text]


def test_a_loop_that_goes_through_completed_epochs_again_is_told_so_once(tmp_path: Path) -> None:
    for steps, warnings in ((2, 0), (5, 1)):
        folder = str(tmp_path / f"run-{steps}")
        assert spawn(1, plain_loop, folder, steps) == [[]]
        checkpoint = str(newest(Path(folder, "checkpoints"))[0])
        assert len(spawn(1, plain_loop, folder, 6, WEFT_RESUME=checkpoint)[0]) == warnings
