"""Loops over data are one process on the joined batch, or are refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

import weft
from tests.process.harness import ChildError, spawn
from weft.runtime.record.run_folder import events

STRATEGIES = {
    "direct": ("bsp / direct", 2),
    "ring": ("bsp / ring / wfbp", 2),
    "priority": ("bsp / direct / priority(partition=128B, credit=300B, least=64B)", 2),
    "factors": ("bsp / ring / sufficient_factors", 2),
    "topk": ("bsp / tree / error_feedback(topk(ratio=1.0))", 2),
    "carried": ("bsp / direct", 1),
    "carried topk": ("bsp / ring / error_feedback(topk(ratio=1.0)) / priority", 1),
    "servers": ("bsp / parameter_server(servers=2)", 2),
    "servers topk": ("bsp / colocated / topk(ratio=1.0) / priority", 2),
    "groups": ("bsp / hierarchical(groups=1)", 2),
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def run_loop(name: str, *args: Any, workers: int = 2) -> list[list[float]]:
    strategy, processes = STRATEGIES[name]
    found: list[list[float]] = spawn(processes, *args, workers=workers, WEFT_STRATEGY=strategy)
    return found


def assert_all_are(wanted: list[float], found: list[list[float]]) -> None:
    for ours in found:
        assert torch.allclose(torch.tensor(ours), torch.tensor(wanted), rtol=0, atol=1e-12)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def weights(model: nn.Module) -> list[float]:
    return [value for p in model.parameters() for value in p.detach().double().flatten().tolist()]


def random_numbers(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(6, 3).double()


def joined(loader: Any, count: int = 2) -> Iterator[list[Any]]:
    source = iter(loader)
    while group := list(itertools.islice(source, count)):
        yield [torch.cat(parts) for parts in zip(*group, strict=True)]


# --- losses that are not a mean over the first dimension --------------------------------------------------------------


def sentences() -> DataLoader[Any]:
    """Uneven numbers of tokens; the third batch has none, and the last step has one batch."""
    rng = torch.Generator().manual_seed(2)
    x, y = (torch.randint(0, 8, (33, 5), generator=rng) for _ in range(2))
    for row, tokens in enumerate(torch.randint(1, 6, (33,), generator=rng).tolist()):
        y[row, tokens:] = -100
    y[6:9] = -100
    return DataLoader(TensorDataset(x, y), batch_size=3)


def language_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(8, 5), nn.Linear(5, 8)).double()


def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A mean over tokens; 0 where there is none, as a careful loop has it."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / max(1, int((y != -100).sum()))


def tokens() -> list[float]:
    run = weft.init()
    model: Any = language_model()
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.shard(sentences(), samples=lambda batch: (batch[1] != -100).sum()):
        token_loss(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return weights(model)


@every_strategy
def test_a_mean_over_tokens(name: str) -> None:
    model = language_model()
    optimizer = sgd(model)
    for x, y in joined(sentences()):
        token_loss(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_all_are(weights(model), run_loop(name, tokens))


def recordings() -> list[tuple[Tensor, Tensor]]:
    """Time first; batches of 3 and 2."""
    shapes = ((4, 3), (8, 2), (2, 3), (6, 3), (5, 2), (3, 3), (7, 3))
    return [(random_numbers(*shape, 6), random_numbers(shape[1], 3, seed=3)) for shape in shapes]


def time_first() -> list[float]:
    run = weft.init()
    model: Any = linear()
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.shard(recordings(), samples=lambda batch: batch[0].shape[1]):
        F.mse_loss(model(x).mean(0), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return weights(model)


@pytest.mark.parametrize("name", ["direct", "carried", "servers"])
def test_the_batch_is_the_second_dimension(name: str) -> None:
    model = linear()
    optimizer = sgd(model)
    given = recordings()
    for at in range(0, len(given), 2):
        losses = [((model(x).mean(0) - y) ** 2).mean(1) for x, y in given[at : at + 2]]
        torch.cat(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_all_are(weights(model), run_loop(name, time_first))


def pairs() -> DataLoader[Any]:
    return DataLoader(TensorDataset(random_numbers(25, 6), random_numbers(25, 3, seed=3)), batch_size=3)


def sums() -> list[float]:
    """The loss is a sum; the last batch has one sample, and no peer."""
    run = weft.init()
    model: Any = linear()
    model, optimizer = run.distribute(model, sgd(model, lr=0.01), reduction="sum")
    for x, y in run.shard(pairs()):
        F.mse_loss(model(x), y, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return weights(model)


@every_strategy
def test_a_loss_that_is_a_sum(name: str) -> None:
    model = linear()
    optimizer = sgd(model, lr=0.01)
    for x, y in joined(pairs()):
        F.mse_loss(model(x), y, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_all_are(weights(model), run_loop(name, sums))


def asks(what: str) -> None:
    run = weft.init()
    model: Any = linear()
    optimizer: Any = sgd(model)
    more = {"reduction": what} if what in ("sum", "product") else {}
    run.distribute(model, optimizer, **more)
    own = {"own": True} if what == "own" else {}
    count = (lambda batch: -1) if what == "negative" else (lambda batch: 0 if what == "nothing" else 3)
    for x, y in run.shard(pairs(), samples=count, **own):
        if what == "accumulate":
            with run.accumulate():
                F.mse_loss(model(x), y).backward()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()


@pytest.mark.parametrize(
    ("what", "strategy", "words"),
    [
        ("samples", "asp / parameter_server", "samples= compares the batches of one step, and under asp"),
        ("sum", "asp / parameter_server", 'reduction="sum" adds up the gradients of one step, and under asp'),
        ("sum", "bsp / direct", "leave one of them out"),
        ("product", "bsp / direct", "reduction='product' is not known"),
        ("own", "bsp / direct", "samples= and own=True cannot go together"),
        ("accumulate", "bsp / direct", "accumulate() adds gradients before that"),
        ("negative", "bsp / direct", "samples= returned -1.0 for a batch"),
        ("nothing", "bsp / direct", "no worker has a sample in this step"),
    ],
)
def test_what_cannot_be_weighed_is_refused(what: str, strategy: str, words: str) -> None:
    with pytest.raises(ChildError) as caught:
        spawn(2, asks, what, WEFT_STRATEGY=strategy)
    assert words in str(caught.value) and caught.value.kind in ("LoopError", "UserError")


# --- loaders ----------------------------------------------------------------------------------------------------------


class Doubled(DataLoader[Any]):
    """A loader that does something to its batches."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield x * 2, y + 1


def doubled() -> list[float]:
    run = weft.init()
    model: Any = linear()
    model, optimizer = run.distribute(model, sgd(model))
    for x, y in run.shard(Doubled(pairs().dataset, batch_size=3)):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return weights(model)


@pytest.mark.parametrize("name", ["direct", "carried", "servers"])
def test_a_loader_with_an_iteration_of_its_own(name: str) -> None:
    model = linear()
    optimizer = sgd(model)
    for x, y in joined(Doubled(pairs().dataset, batch_size=3)):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_all_are(weights(model), run_loop(name, doubled))


class Shuffled(Sampler[int]):
    """Shuffles by Python's random numbers."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(24), 24))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(24).tolist()


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def train(run: Any, model: nn.Module, optimizer: Any, x: Tensor) -> list[int]:
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [int(value) for value in x.flatten()]


def reads(kind: str) -> list[list[int]]:
    """The samples that this process has used, by epoch; each process draws as many random numbers as its rank says."""
    run = weft.init(steps=24)
    model: Any = nn.Linear(1, 1)
    model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    seen: list[list[int]] = []
    for _ in range(2):
        for _ in range(run.rank):
            random.random()
        loader: Any
        match kind:
            case "python":
                loader = DataLoader(Numbers(), batch_size=2, sampler=Shuffled())
            case "endless":
                loader = DataLoader(Numbers(), batch_size=2, sampler=Endless())
            case "by itself":
                loader = list(torch.arange(24.0)[torch.randperm(24)].view(12, 2, 1))
            case _:
                loader = [torch.ones(2, 1)] * (12 + 4 * run.rank)
        seen.append([])
        for x in run.shard(loader):
            seen[-1] += train(run, model, optimizer, x)
    run.close()
    return seen


@pytest.mark.parametrize("strategy", ["bsp / direct", "bsp / parameter_server", "bsp / ring / priority"])
def test_a_sampler_on_pythons_random_numbers(strategy: str) -> None:
    first, second = spawn(2, reads, "python", WEFT_STRATEGY=strategy)
    for mine, theirs in zip(first, second, strict=True):
        assert sorted(mine + theirs) == list(range(24))
    assert first[0] != first[1], "each epoch has an order of its own"


def test_a_sampler_without_an_end_is_read_as_it_is_needed() -> None:
    first, second = spawn(2, reads, "endless", WEFT_STRATEGY="bsp / direct")
    taken = [
        sample for pair in zip(_pairs(first[0]), _pairs(second[0]), strict=True) for both in pair for sample in both
    ]
    assert len(taken) == 96
    for at in range(0, 96, 24):
        assert sorted(taken[at : at + 24]) == list(range(24))


def _pairs(samples: list[int]) -> list[list[int]]:
    return [samples[at : at + 2] for at in range(0, len(samples), 2)]


@pytest.mark.parametrize("strategy", ["bsp / direct", "bsp / ring / priority", "bsp / parameter_server"])
@pytest.mark.parametrize("kind", ["by itself", "of another length"])
def test_loaders_that_differ_are_refused(kind: str, strategy: str) -> None:
    with pytest.raises(ChildError, match="the loaders of the processes give different batches") as caught:
        spawn(2, reads, kind, WEFT_STRATEGY=strategy)
    assert caught.value.kind == "LoopError"


def zipped(sizes: tuple[int, int]) -> tuple[int, list[int], list[int]]:
    """Pairs of a sample with itself, and what was used of either loader."""
    run = weft.init()
    model: Any = nn.Linear(1, 1)
    model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    one, two = (DataLoader(Numbers(), batch_size=size, shuffle=True) for size in sizes)
    same, left, right = 0, [], []
    for a, b in zip(run.shard(one), run.shard(two), strict=False):
        same += int((a[: len(b)] == b[: len(a)]).sum())
        left += a.flatten().int().tolist()
        right += b.flatten().int().tolist()
        train(run, model, optimizer, torch.cat([a, b]))
    run.close()
    return same, left, right


@pytest.mark.parametrize("processes", [1, 2])
def test_two_loaders_side_by_side_have_orders_of_their_own(processes: int) -> None:
    found = spawn(processes, zipped, (2, 2), workers=2, WEFT_STRATEGY="bsp / direct")
    assert sum(same for same, _, _ in found) < 12
    for side in (1, 2):
        assert sorted(sample for each in found for sample in each[side]) == list(range(24))


def test_two_loaders_that_weigh_a_step_differently_are_refused() -> None:
    with pytest.raises(ChildError, match="different shares"):  # the last batch of the first one has 4 samples, not 5
        spawn(2, zipped, (5, 4), workers=2, WEFT_STRATEGY="bsp / direct")


def lengths() -> tuple[int, int]:
    run = weft.init()
    model: Any = nn.Linear(1, 1)
    model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    shard = run.shard(DataLoader(Numbers(), batch_size=5, drop_last=True, collate_fn=torch.stack), epochs=1)
    steps = sum(1 for x in shard if train(run, model, optimizer, x))
    run.close()
    return len(shard), steps


def test_the_length_does_not_count_a_step_that_is_dropped() -> None:
    assert spawn(3, lengths) == [(1, 1)] * 3


# --- steps ------------------------------------------------------------------------------------------------------------


def skips(at: int, steps: int) -> None:
    """Worker 1 leaves one step out, by what it sees of its own batch."""
    run = weft.init(steps=steps)
    model: Any = linear()
    model, optimizer = run.distribute(model, sgd(model))
    for number, (x, y) in enumerate(run.shard(pairs(), epochs=None)):
        F.mse_loss(model(x), y).backward()
        if not (run.rank == 1 and number == at):
            optimizer.step()
        optimizer.zero_grad()
    run.close()


@pytest.mark.parametrize("strategy", ["bsp / direct", "bsp / ring / priority", "bsp / tree / topk(ratio=1.0)"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_step_that_one_worker_skips_is_refused(at: int, strategy: str) -> None:
    """The second is the last one of the run."""
    with pytest.raises(ChildError, match=f"process 1 has taken {at} steps, process 0 {at + 1}") as caught:
        spawn(2, skips, at, 4, WEFT_STRATEGY=strategy)
    assert caught.value.kind == "LoopError"


def evaluates() -> list[float]:
    """The main process alone looks at data of its own choosing, between steps and within one."""
    run = weft.init()
    model: Any = linear()
    model, optimizer = run.distribute(model, sgd(model))
    for number, (x, y) in enumerate(run.shard(pairs())):
        loss = F.mse_loss(model(x), y)
        if run.is_main and number in (1, 4):
            with torch.no_grad():
                for held_out, _ in run.evaluate(DataLoader(TensorDataset(random_numbers(10, 6), torch.ones(10)), 3)):
                    model(held_out)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return weights(model)


@pytest.mark.parametrize("name", ["direct", "servers"])
def test_an_evaluation_by_one_process_changes_nothing(name: str) -> None:
    model = linear()
    optimizer = sgd(model)
    for x, y in joined(pairs()):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_all_are(weights(model), run_loop(name, evaluates))


def counts(folder: str) -> None:
    run = weft.init(out=folder, save_every=0)
    model: Any = nn.Linear(1, 1)
    model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    count = torch.zeros(())
    for x in run.shard([torch.ones(1, 1)] * 5):
        train(run, model, optimizer, x)
        count += 1
        run.log(count=count)
    run.close()


def test_a_logged_tensor_is_kept_as_it_was(tmp_path: Path) -> None:
    spawn(1, counts, str(tmp_path))
    assert [event["count"] for event in events(tmp_path)] == [1, 2, 3, 4, 5]
