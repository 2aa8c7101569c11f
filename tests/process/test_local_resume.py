"""Checkpoints of local optimizers under other circumstances, and input that is refused in one sentence."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.process.commands import Command
from tests.process.commands import Job as Script
from tests.process.harness import ChildError, spawn
from tests.process.merged_in_numpy import LR, MOMENTUM, flat
from tests.process.test_local_optimizers import batches, build, loss_of
from weft.runtime.checkpoint.state import mean_of
from weft.store.checkpoint import found_in
from weft.strategy import Strategy

AT, STEPS = 5, 10
AVERAGE = "average(every=4) / bsp / direct"
Look = tuple[list[float], list[float], list[float]]
"""A worker's copy and momentum, and the anchor."""


class Heard(logging.Handler):
    """Keeps the messages of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train(folder: str, steps: int) -> tuple[dict[int, Look], list[float], list[str]]:
    """What a worker has before each step, the model in the end, and what the log says."""
    heard = Heard()
    logging.getLogger("weft").addHandler(heard)
    run = weft.init(out=folder, steps=steps)
    model: Any = build()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    model, optimizer = run.distribute(model, optimizer)

    def values() -> list[float]:
        return flat(p.detach().numpy() for p in model.parameters())

    seen = {}
    for batch in run.shard(batches(STEPS), epochs=None):
        with run.merged():
            anchor = values()
        kept = [optimizer.state[p].get("momentum_buffer") for p in model.parameters() if p in optimizer.state]
        seen[run.step] = values(), flat(each.numpy() for each in kept if each is not None), anchor
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return seen, values(), heard.messages


def resumed(folder: Path, strategy: str, workers: int) -> list[Any]:
    (last,) = [found for found in found_in(folder / "checkpoints") if found.name == f"step-{AT:08d}"]
    env = {"WEFT_STRATEGY": strategy, "WEFT_SAVE_EVERY": str(AT), "WEFT_RESUME": str(last)}
    return spawn(workers, train, str(folder), STEPS, **env)


def saved(folder: Path, strategy: str) -> list[Any]:
    """Train four workers past a checkpoint."""
    return spawn(4, train, str(folder), AT + 1, WEFT_STRATEGY=strategy, WEFT_SAVE_EVERY=str(AT))


def mean(rows: list[list[float]]) -> list[float]:
    return [sum(values) / len(rows) for values in zip(*rows, strict=True)]


@pytest.mark.parametrize("workers", [1, 2, 6])
def test_another_number_of_workers_starts_from_averages(workers: int, tmp_path: Path) -> None:
    before = [seen[AT] for seen, _, _ in saved(tmp_path, AVERAGE)]
    copies, momenta, anchors = ([look[part] for look in before] for part in range(3))
    assert copies[0] != copies[1] and momenta[0] != momenta[1]
    after = resumed(tmp_path, AVERAGE, workers)
    for seen, _, _ in after:
        copy, momentum, anchor = seen[AT]
        assert copy == pytest.approx(mean(copies), rel=0, abs=1e-14)
        assert momentum == pytest.approx(mean(momenta), rel=0, abs=1e-14)
        assert anchor == anchors[0]
    said = "the local models and optimizers are replaced by their averages"
    assert any(said in message for message in after[0][2])
    assert all(final == after[0][1] for _, final, _ in after)


def test_shares_of_samples_are_counted_anew_with_another_number_of_workers(tmp_path: Path) -> None:
    """One worker that goes on from the averages of four trains as if it were alone."""
    before = [seen[AT] for seen, _, _ in saved(tmp_path, AVERAGE)]
    ((_, final, _),) = resumed(tmp_path, AVERAGE, 1)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    put([p.data for p in model.parameters()], mean([copy for copy, _, _ in before]))
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    put(momenta, mean([momentum for _, momentum, _ in before]))
    for batch in batches(STEPS)[4 * AT : 4 * AT + STEPS - AT]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    assert final == pytest.approx(flat(p.detach().numpy() for p in model.parameters()), rel=0, abs=1e-12)


def test_averages_are_of_the_workers_that_have_a_state() -> None:
    """An optimizer has none for a parameter that its worker has not used, and counts of steps are not averaged."""
    one = {0: {"step": torch.tensor(3), "momentum_buffer": None}, 1: {"exp_avg": torch.ones(2)}}
    other = {0: {"step": torch.tensor(5), "momentum_buffer": torch.full((2,), 4.0)}}
    third = {2: {"exp_avg": torch.full((2,), 7.0)}, 1: {"exp_avg": torch.full((2,), 2.0)}}
    mean = mean_of([one, other, third])
    assert mean.keys() == {0, 1, 2} and mean[0]["step"] == 3
    assert mean[0]["momentum_buffer"].tolist() == [4, 4]
    assert mean[1]["exp_avg"].tolist() == [1.5, 1.5] and mean[2]["exp_avg"].tolist() == [7, 7]


def put(tensors: list[torch.Tensor], values: list[float]) -> None:
    at = 0
    for tensor in tensors:
        tensor.copy_(torch.tensor(values[at : at + tensor.numel()], dtype=torch.float64).view_as(tensor))
        at += tensor.numel()


def test_a_synchronous_run_goes_on_with_local_optimizers(tmp_path: Path) -> None:
    """Averaging in every step from there on, it is the synchronous run."""
    synchronous = saved(tmp_path / "one", "bsp / direct")
    whole = resumed(tmp_path / "one", "bsp / direct", 4)
    saved(tmp_path / "two", "bsp / direct")
    mixed = resumed(tmp_path / "two", "average / bsp / direct", 4)
    for (seen, final, said), (_, expected, _) in zip(mixed, whole, strict=True):
        assert final == pytest.approx(expected, rel=0, abs=1e-10)
        assert seen[AT] == synchronous[0][0][AT]
        assert any("every worker starts average from the saved model and optimizer" in line for line in said)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("average(every=4)", "outer(every=4)"),
        ("outer(every=4)", "gradient"),
        ("streaming(every=4, fragments=2)", "streaming(every=4, fragments=3)"),
    ],
)
def test_a_checkpoint_of_another_answer_is_refused(before: str, after: str, tmp_path: Path) -> None:
    saved(tmp_path, f"{before} / bsp / direct")
    with pytest.raises(ChildError) as caught:
        resumed(tmp_path, f"{after} / bsp / direct", 4)
    words = str(caught.value).strip().splitlines()[-1]
    assert caught.value.kind == "UserError"
    assert f"was saved under {before}, with an optimizer for each worker" in words
    assert f"resume with {before}, or start a new run from the merged model, weft.load(" in words


def test_the_numbers_of_an_answer_may_change(tmp_path: Path) -> None:
    before = saved(tmp_path, AVERAGE)
    after = resumed(tmp_path, "average(every=2) / bsp / direct", 4)
    assert [seen[AT] for seen, *_ in after] == [seen[AT] for seen, *_ in before]


# --- bad input --------------------------------------------------------------------------------------------------------

REFUSED = {
    "average(every=0) / bsp / ring": "every is 0, but must be at least 1",
    "post_local(switch_at=-1) / bsp / ring": "switch_at is -1, but must be at least 0",
    "block_momentum(momentum=1.0) / bsp / ring": "momentum is 1.0, but must be at least 0 and less than 1",
    "sma(alpha=2.0) / bsp / ring": "alpha is 2.0, but must be between 0 and 1; 0 means 1 / workers",
    "outer(lr=0.0) / bsp / ring": "lr is 0.0, but must be greater than 0",
    "streaming(fragments=0) / bsp / ring": "fragments is 0, but must be at least 1",
    "streaming(every=4, fragments=5) / bsp / ring": "5 fragments do not fit into every=4 steps; use fewer fragments",
    "streaming(every=4, fragments=2, delay=5) / bsp / ring": "delay is 5, but must be at most every=4",
    "outer / bsp / direct / dgc": "Try '{0} / bsp / direct / int8'",
    "outer / bsp / direct / sufficient_factors": "Try '{0} / bsp / direct / int8'",
    "outer / bsp / direct / only(sufficient_factors)": "Try '{0} / bsp / direct / int8'",
    "outer / bsp / ring / wfbp": "Try '{0} / bsp / ring'",
    "outer / bsp / ring / fused(bucket=1MiB)": "Try '{0} / bsp / ring'",
    "outer / asp / ring": "Try '{0} / bsp / ring'",
    "outer / asp / parameter_server": "Try '{0} / bsp / direct'",
    "outer / bsp / parameter_server": "Try '{0} / bsp / direct'",
    "average / bsp / hierarchical": "Try '{0} / bsp / direct'",
    "sma / asp / shared_memory": "Try '{0} / bsp / direct'",
}
"""Each with its remedy; {0}: the optimization."""


@pytest.mark.parametrize("strategy", REFUSED)
def test_bad_input_is_refused_in_one_sentence(strategy: str, scratch: Path, weft: Command) -> None:
    done = weft("check", strategy, cwd=scratch)
    assert done.returncode == 2 and done.stdout == ""
    (said,) = done.stderr.strip().splitlines()
    assert REFUSED[strategy].format(strategy.partition(" /")[0]) in said, said
    for remedy in re.findall(r"Try '(.*)'", said):
        assert Strategy.parse(remedy).check()


JOB = """
import torch, weft
run = weft.init(steps=2)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, *_ = run.distribute(model, optimizer{more})
for x in run.shard([torch.ones(2, 3)] * 8):
    model(x).sum().backward()
    optimizer.step()
"""
UNFIT = {
    "": "the model has 2 layers, and cannot be merged in 3 fragments; use fewer",
    ", torch.optim.SGD(model[0].parameters(), lr=0.1)": "put the parameters of the second optimizer into a group of",
    ", torch.optim.swa_utils.AveragedModel(model)": "update it inside `with run.merged():`",
    ', reduction="sum"': "adds up the gradients of all workers, and local optimizers exchange none; leave it out",
}


@pytest.mark.parametrize("more", UNFIT)
def test_models_and_followers_that_do_not_fit_are_refused(more: str, scratch: Path, job: Script, weft: Command) -> None:
    job(JOB.format(more=more))
    fragments = 2 if more else 3
    strategy = f"streaming(every=4, fragments={fragments}) / bsp / direct"
    done = weft("train", "job.py", "-n", 2, "--strategy", strategy, "--out", "run", cwd=scratch)
    assert done.returncode == 2, done.stderr
    assert UNFIT[more] in done.stderr and "Traceback" not in done.stderr + done.stdout
