"""`run.evaluate`, `run.mean`, `run.sum` and `run.gather`: every sample once, and the figures of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import weft
from tests.process.harness import ChildError, spawn
from weft.store.checkpoint import newest

SAMPLES = 100


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return ((torch.tensor([i / SAMPLES]), torch.tensor(i)) for i in range(SAMPLES))


class Drawn(Dataset[Any]):
    """Samples with an augmentation."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([i / SAMPLES]) + 0 * torch.rand(1), torch.tensor(i)


def loader(kind: str) -> Any:
    x = torch.arange(SAMPLES) / SAMPLES
    samples = TensorDataset(x.view(-1, 1), torch.arange(SAMPLES))
    match kind:
        case "map":
            return DataLoader(samples, batch_size=16)
        case "shuffled":
            return DataLoader(samples, batch_size=7, shuffle=True)
        case "stream":
            return DataLoader(Stream(), batch_size=16)
        case "workers":
            return DataLoader(Drawn(), batch_size=16, num_workers=1)
        case "list":
            return [(x[i : i + 30].view(-1, 1), torch.arange(SAMPLES)[i : i + 30]) for i in range(0, SAMPLES, 30)]
    raise AssertionError(kind)


def figures(run: Any, model: nn.Module, data: Any) -> list[Any]:
    """The figures of an evaluation, and the samples in it."""
    losses, indices = 0.0, []
    with torch.no_grad():
        for x, index in run.evaluate(data):
            losses += (model(x) ** 2).sum().item()
            indices.append(index)
    mine = torch.cat(indices) if indices else torch.empty(0, dtype=torch.int64)
    total, mean = run.sum(loss=losses, n=len(mine)), run.mean(loss=losses / max(1, len(mine)), weight=len(mine))
    return [total["loss"], total["n"], mean["loss"], sorted(run.gather(mine).tolist())]


def evaluating(folder: str, kind: str, steps: int | None) -> tuple[list[Any], list[torch.Tensor]]:
    """Evaluate before, within and after training; returns all figures, and the trained parameters."""
    run = weft.init(out=folder, steps=steps, save_every=2)
    x = torch.linspace(-1, 1, 12 * 2).view(-1, 1)
    model: Any = nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = run.distribute(model, optimizer)
    data, found = loader(kind), []

    def evaluate() -> None:
        model.eval()
        found.append(figures(run, lambda x: model(x.double()), data))
        model.train()

    evaluate()
    for epoch in run.epochs(2):
        for (inputs,) in run.shard(DataLoader(TensorDataset(x), batch_size=12 // run.workers, shuffle=True)):
            (model(inputs.double()) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if epoch == 0 and kind == "map" and run.step == 2:
                evaluate()
        evaluate()
    evaluate()
    run.close()
    return found, [p.detach() for p in model.parameters()]


def close(one: list[Any], other: list[Any]) -> bool:
    return one[1:2] + one[3:] == other[1:2] + other[3:] and all(
        abs(a - b) <= 1e-12 * max(1, abs(b)) for a, b in zip((one[0], one[2]), (other[0], other[2]), strict=True)
    )


@pytest.mark.parametrize("kind", ["map", "shuffled", "stream", "workers", "list"])
def test_every_sample_once_and_the_figures_of_one_process(tmp_path: Path, kind: str) -> None:
    for number, (processes, workers) in enumerate([(1, 1), (2, 2), (3, 3), (1, 4)]):
        rows = spawn(processes, evaluating, str(tmp_path / str(number)), kind, None, workers=workers)
        for found, _ in rows:
            assert all(each[1] == SAMPLES and each[3] == list(range(SAMPLES)) for each in found)
            assert all(close(each, other) for each, other in zip(found, rows[0][0], strict=True))
        before = rows[0][0][0]
        if number == 0:
            alone = before
        assert close(before, alone), "the same model before training"


def test_trained_models_evaluate_alike_on_one_and_on_several_processes(tmp_path: Path) -> None:
    """Four workers in one process train the bits of four processes, and evaluation within a step changes none."""
    found, model = spawn(1, evaluating, str(tmp_path / "one"), "map", None, workers=4)[0]
    others, same = spawn(4, evaluating, str(tmp_path / "four"), "map", None, workers=4)[0]
    assert all(torch.equal(a, b) for a, b in zip(model, same, strict=True))
    assert close(found[-1], others[-1])


def test_steps_and_a_resumption_do_not_bound_an_evaluation(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    first = spawn(2, evaluating, folder, "shuffled", 2)
    assert all(each[1] == SAMPLES for found, _ in first for each in found)
    checkpoint = str(newest(Path(folder, "checkpoints"))[0])
    rest = spawn(2, evaluating, folder, "shuffled", None, WEFT_RESUME=checkpoint)
    whole = spawn(2, evaluating, str(tmp_path / "whole"), "shuffled", None)
    assert close(rest[0][0][-1], whole[0][0][-1])
    assert all(torch.equal(a, b) for a, b in zip(rest[0][1], whole[0][1], strict=True))


def under_servers(early: bool) -> list[Any]:
    run = weft.init()
    model: Any = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.distribute(model, optimizer)
    found = []
    for _ in run.epochs(2):
        for (x,) in run.shard(DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=1)):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if early:
            run.sum(n=1)
    found = figures(run, model, loader("map"))
    run.close()
    return found


@pytest.mark.parametrize("strategy", ["bsp", "asp", "ssp(slack=2)", "downpour(push=2, fetch=2) / asp"])
def test_workers_among_servers_evaluate_one_model(strategy: str) -> None:
    """Without lockstep figures are those of the final model, once every worker has taken its last step."""
    rows = spawn(2, under_servers, False, WEFT_STRATEGY=f"{strategy} / parameter_server")[:2]
    assert rows[0] == rows[1] and rows[0][1] == SAMPLES and rows[0][3] == list(range(SAMPLES))


def test_figures_cannot_be_reduced_while_workers_are_at_different_steps() -> None:
    with pytest.raises(ChildError, match="only after the last step under asp"):
        spawn(2, under_servers, True, WEFT_STRATEGY="asp / parameter_server", fresh=True)


def reduces(how: str) -> Any:
    run = weft.init(data="own")
    match how:
        case "sums":
            return run.sum(n=run.rank, t=torch.tensor([1.0, run.rank])), run.mean(
                a=float("nan") if run.rank else 3, weight=int(run.rank == 0)
            )
        case "gather":
            return run.gather(torch.full((run.rank, 2), run.rank, dtype=torch.int16))
        case "other names":
            return run.sum(**{f"n{run.rank}": 1})
        case "other data":
            for _ in run.evaluate([torch.ones(1) * run.rank]):
                pass
            return run.sum(n=1)
        case "no weight":
            return run.mean(loss=1.0, weight=0)
        case "negative":
            return run.mean(loss=1.0, weight=-1)
        case "scalar":
            return run.gather(torch.ones(()))
        case "in training mode":
            for _ in run.shard([torch.ones(1)]):
                pass
        case "without gradients":
            with torch.no_grad():
                for _ in run.shard([torch.ones(1)]):
                    pass
    return None


def test_reductions_of_several_processes() -> None:
    for total, mean in spawn(3, reduces, "sums"):
        assert total["n"] == 3 and total["t"].tolist() == [3.0, 3.0] and total["t"].dtype == torch.float64
        assert mean == {"a": 3.0}
    gathered = spawn(3, reduces, "gather")
    assert all(each.tolist() == [[1, 1], [2, 2], [2, 2]] and each.dtype == torch.int16 for each in gathered)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("other names", "make different calls at run.sum"),
        ("other data", "evaluated different data"),
        ("no weight", "weight 0 from every process"),
        ("negative", "weight=-1"),
        ("scalar", "unsqueeze"),
        ("without gradients", "evaluate with run.evaluate"),
    ],
)
def test_refused_reductions(how: str, why: str) -> None:
    with pytest.raises(ChildError, match=why):
        spawn(2, reduces, how, fresh=True)
