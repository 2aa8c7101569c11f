"""Training loops whose data is uneven, or each worker's own, or comes from an unusual loader."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.process.loop_cases import BRANCH, Branches
from tests.process.loop_grounds import WORKERS, Batch, batches, dataset, fit, mlp, mse, sgd, state_of


def uneven(run: Any) -> dict[str, Any]:
    """22 batches, the last of one sample: at the last step two workers have no batch, and one a short one."""
    model = mlp()
    return fit(run, model, sgd(model), run.shard(batches(64)))


def uneven_sizes() -> list[list[int]]:
    return [[3] * WORKERS] * 5 + [[3, 1, 0, 0]]


def uneven_list(run: Any) -> dict[str, Any]:
    """Any iterable of batches, of any sizes."""
    model = mlp()
    data = dataset().tensors
    cuts = list(itertools.accumulate(itertools.chain.from_iterable(LIST_SIZES)))
    loader = [(data[0][b - n : b], data[1][b - n : b]) for b, n in zip(cuts, itertools.chain(*LIST_SIZES), strict=True)]
    return fit(run, model, sgd(model), run.shard(batch for batch in loader if len(batch[0])))


LIST_SIZES = [[1, 2, 3, 4], [5, 1, 1, 1], [2, 2, 2, 2], [4, 3, 2, 1], [1, 0, 0, 0]]


def own(run: Any) -> dict[str, Any]:
    """Everyone brings loaders of their own length; worker 0 is the first to run out."""
    model = mlp()
    return fit(run, model, sgd(model), run.own(own_loaders()))


def own_loaders(takers: Sequence[int] = ()) -> list[DataLoader[Any]]:
    """2, 5, 3 and 6 batches, most with a short last one."""
    x, y = dataset().tensors
    x[:, 0].clamp_(max=1.0)
    x[list(takers), 0] = 2 * BRANCH
    ends = [0, 5, 20, 28, 44]
    return [DataLoader(TensorDataset(x[a:b], y[a:b]), batch_size=3) for a, b in itertools.pairwise(ends)]


def own_sizes() -> list[list[int]]:
    sizes = [[len(x) for x, _ in loader] for loader in own_loaders()]
    return [list(row) for row in itertools.zip_longest(*sizes, fillvalue=0)]


def own_list(run: Any) -> dict[str, Any]:
    """The same batches from loaders that do not know their sizes ahead."""
    model = mlp()
    return fit(run, model, sgd(model), run.own([list(loader) for loader in own_loaders()]))


def own_overflow(run: Any) -> dict[str, Any]:
    """Worker 0's last batch overflows and all skip; what it computes later, without a batch, must not count."""
    model = mlp()
    grow = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model, optimizer, grow = run.distribute(model, sgd(model), grow)
    loaders = own_loaders()
    loaders[0].dataset.tensors[1][-1] = 1e308
    for x, y in run.own(loaders):
        loss = mse(model(x), y)
        grow.scale(loss).backward()
        grow.step(optimizer)
        grow.update()
        optimizer.zero_grad()
        run.log(loss=loss)
    return state_of(model, scale=grow.get_scale())


def own_unused(run: Any) -> dict[str, Any]:
    """Worker 0's last batch takes the branch; worker 0 without a batch must not count as taking it again."""
    model = Branches()
    return fit(run, model, sgd(model), run.own(own_loaders(takers=[1, 4])), unused=True)


def workers_of_a_loader(run: Any) -> dict[str, Any]:
    """A DataLoader with processes of its own, shuffled by the user's generator."""
    model = mlp()
    rng = torch.Generator().manual_seed(11)
    return fit(
        run,
        model,
        sgd(model),
        run.shard(DataLoader(dataset(), batch_size=3, shuffle=True, num_workers=2, generator=rng, **FORK)),
    )


FORK: dict[str, Any] = {"multiprocessing_context": "fork"}  # Linux's default, which a fork server's children lack


class Ready(torch.utils.data.Dataset[Batch]):
    """A dataset of whole batches."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Batch:
        x, y = dataset(64).tensors
        return x[index * 3 : index * 3 + 3], y[index * 3 : index * 3 + 3]


def batched_dataset(run: Any) -> dict[str, Any]:
    model = mlp()
    return fit(run, model, sgd(model), run.shard(DataLoader(Ready(), batch_size=None)))


class Stream(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        return iter(dataset(64))


def dropped(run: Any) -> dict[str, Any]:
    """22 batches and one dropped sample: drop_last also drops the two batches that make no whole step."""
    model = mlp()
    return fit(run, model, sgd(model), run.shard(DataLoader(dataset(67), batch_size=3, drop_last=True)))


def streamed(run: Any) -> dict[str, Any]:
    model = mlp()
    return fit(run, model, sgd(model), run.shard(DataLoader(Stream(), batch_size=3)))
