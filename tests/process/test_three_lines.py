"""A forgotten line of the three is an error, and what the three lines do by themselves: devices, closures, one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.process.commands import WEFT
from tests.process.harness import ChildError, spawn
from weft.environment import check_names
from weft.errors import UserError
from weft.runtime.loop.devices import move_batch, move_training

JOB = """
import torch, weft
{init}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{distribute}
data = [(torch.ones(2, 2),)] * 4
for (x,) in {shard}:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""
LINES = {"init": "run = weft.init()", "distribute": "run.distribute(model, optimizer)", "shard": "run.shard(data)"}


def run_job(folder: Path, *, env: dict[str, str] | None = None, **lines: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, as `python job.py` starts it."""
    script = folder / "job.py"
    script.write_text(JOB.format(**LINES | lines))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WEFT_")}
    return subprocess.run(
        [sys.executable, str(script)], env=kept | (env or {}), capture_output=True, text=True, check=False
    )


def test_python_alone_says_which_run_it_is(tmp_path: Path) -> None:
    done = run_job(tmp_path, env={"WEFT_STRATEGY": "bsp / ring"})
    assert done.returncode == 0 and done.stdout == "trained\n"
    assert re.fullmatch(r"weft [\d.]+: 1 worker, bsp / ring \(from WEFT_STRATEGY\)\n", done.stderr)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ({"distribute": ""}, "optimizer.step() before run.distribute"),
        ({"shard": "data"}, "used no batch of run.shard()"),
        ({"init": "run = weft.init(data='mine')"}, "data='mine' is not known"),
    ],
)
def test_a_forgotten_line_is_an_error_without_a_launcher(tmp_path: Path, lines: dict[str, str], why: str) -> None:
    done = run_job(tmp_path, **lines)
    assert done.returncode != 0 and why in done.stderr and "trained" not in done.stdout


def test_data_of_its_own(tmp_path: Path) -> None:
    assert run_job(tmp_path, shard="data", init="run = weft.init(data='own')").returncode == 0


def test_a_misspelt_variable_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="WEFT_STRATGY, so unset it or correct it; did you mean 'WEFT_STRATEGY'"):
        check_names({"WEFT_STRATGY": "bsp / ring", "PATH": ""})


# --- devices ----------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")  # noqa: PYI024


class Tokens:
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: torch.device) -> Tokens:
        return Tokens(str(device))


def test_batches_are_moved_whole() -> None:
    device = torch.device("meta")
    batch = {
        "a": [torch.ones(1), 3],
        "b": Pair(torch.ones(2), "text"),
        "c": OrderedDict(d=torch.ones(1)),
        "e": Tokens(),
    }
    moved = move_batch(batch, device)
    assert moved["a"][0].is_meta and moved["a"][1] == 3
    assert isinstance(moved["b"], Pair) and moved["b"].x.is_meta and moved["b"].y == "text"
    assert moved["c"]["d"].is_meta and moved["e"].device == "meta"
    whole = torch.ones(1)
    assert move_batch(whole, torch.device("cpu")) is whole


def test_a_model_without_values_is_refused() -> None:
    model = nn.Linear(1, 1, device="meta")
    with pytest.raises(UserError, match="materialize"):
        move_training(model, torch.optim.SGD(model.parameters(), lr=1), (), torch.device("cpu"))


# --- step(closure) ----------------------------------------------------------------------------------------------------


def by_closure(closure: bool, inner: str) -> list[float]:
    run = weft.init()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "lbfgs": torch.optim.LBFGS}
    optimizer: Any = kinds[inner](model.parameters(), lr=0.1)
    run.distribute(model, optimizer)
    x = torch.linspace(-1, 1, 64).view(32, 2)
    losses = []
    for inputs, targets in run.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4), epochs=2):

        def evaluate(inputs: Any = inputs, targets: Any = targets) -> Any:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        if closure:
            losses.append(optimizer.step(evaluate).item())
        else:
            losses.append(evaluate().item())
            optimizer.step()
    run.close()
    return losses


@pytest.mark.parametrize("strategy", ["bsp / direct", "bsp / direct / priority", "bsp / parameter_server"])
def test_a_closure_that_is_evaluated_once_has_the_bits_of_the_plain_loop(strategy: str) -> None:
    plain = spawn(2, by_closure, False, "adam", WEFT_STRATEGY=strategy)[:2]
    assert spawn(2, by_closure, True, "adam", WEFT_STRATEGY=strategy)[:2] == plain


def test_several_workers_in_one_process_evaluate_a_closure_each() -> None:
    assert spawn(1, by_closure, True, "sgd", workers=2) == spawn(1, by_closure, False, "sgd", workers=2)


def test_a_closure_that_is_evaluated_again_is_refused() -> None:
    with pytest.raises(ChildError, match="evaluated its closure twice"):
        spawn(2, by_closure, True, "lbfgs", fresh=True)
    assert len(spawn(1, by_closure, True, "lbfgs")[0]) == 16, "one worker alone may evaluate as often as it likes"


# --- weft.load --------------------------------------------------------------------------------------------------------


def saved(folder: str) -> dict[str, torch.Tensor]:
    run = weft.init(out=folder, save_every=1)
    model: Any = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    run.distribute(model, optimizer)
    for (x,) in run.shard(DataLoader(TensorDataset(torch.randn(12, 1)), batch_size=3)):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_load_reads_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    state = spawn(1, saved, str(tmp_path / "run"))[0]
    loaded = weft.load(tmp_path / "run")
    assert list(loaded) == list(state) and all(torch.equal(loaded[key], state[key]) for key in state)
    newest, older = sorted((tmp_path / "run/checkpoints").glob("step-*"), reverse=True)
    next(newest.glob("model-*")).write_bytes(b"damaged")
    assert not all(torch.equal(value, state[key]) for key, value in weft.load(tmp_path / "run").items())
    assert weft.load(older).keys() == state.keys()
    with pytest.raises(UserError, match=r"damaged|differs|bytes"):
        weft.load(newest)
    with pytest.raises(UserError, match="does not exist"):
        weft.load(tmp_path / "nothing")


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_launched_script_without_init_is_stopped_at_its_first_step(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB.format(init="", distribute="", shard="data").replace("SGD", kind))
    done = subprocess.run([*WEFT, "train", str(script), "-n", "2"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "trains without weft.init()" in done.stderr and "trained" not in done.stdout
    script.write_text(JOB.format(**LINES).replace("SGD", kind))
    done = subprocess.run([*WEFT, "train", str(script), "-n", "2"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
