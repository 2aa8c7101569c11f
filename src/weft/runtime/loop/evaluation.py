"""`run.evaluate`: each batch of a loader goes to exactly one worker, and training is not affected.

Batch b belongs to logical worker b modulo n. A process yields the batches of all workers that it carries, in the
loader's order. Evaluations are no part of the data position: neither `--steps` nor a resumption concerns them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from weft.errors import UserError
from weft.runtime.loop import batch_fingerprint as fingerprint
from weft.runtime.loop.data_sharding import Seeded, Unwrapped, has_indices, loading_options
from weft.runtime.loop.rng import DataRng, rng_kept, stream_seed
from weft.transport.layout import Layout


class Evaluation:
    """The result of `run.evaluate(loader)`: iterate it once per evaluation."""

    def __init__(
        self,
        loader: Iterable[Any],
        layout: Layout,
        seed: int,
        *,
        model: Callable[[], AbstractContextManager[None]],
        moved: Callable[[Any], Any],
        seen: Callable[[int], None],
    ) -> None:
        if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
            raise UserError("the loader already has a DistributedSampler; give run.evaluate() a plain loader")
        self.loader, self.layout, self.seed = loader, layout, stream_seed(seed, "evaluation")
        self.model, self.moved, self.seen = model, moved, seen

    def __len__(self) -> int:
        count = len(self.loader)  # type: ignore[arg-type]
        return sum(map(self._is_mine, range(count)))

    def __iter__(self) -> Iterator[Any]:
        with self.model(), rng_kept():
            for batch in self._indexed(self.loader) if has_indices(self.loader) else self._read():
                yield self.moved(batch)

    def _is_mine(self, number: int) -> bool:
        return number % self.layout.workers in self.layout.carried()

    def _indexed(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """A map-style loader: this process loads only its own batches."""
        draws, mine = DataRng(self.seed), []
        with draws.lent():
            for number, indices in enumerate(map(list, loader.batch_sampler or ())):
                self.seen(fingerprint.of_indices(indices))
                if self._is_mine(number):
                    seeded = [stream_seed(self.seed, number), *indices] if loader.num_workers else indices
                    mine.append(seeded)
        dataset, prepare = loader.dataset, loader.worker_init_fn
        if loader.num_workers:
            dataset, prepare = Seeded(dataset), Unwrapped(prepare)
        same = loading_options(loader) | {"worker_init_fn": prepare}
        return self._drawn(DataLoader(dataset, batch_sampler=mine, **same), draws)

    def _read(self) -> Iterator[Any]:
        """Any other loader: every process reads all of it, with the same random numbers."""
        count = 0
        for number, batch in enumerate(self._drawn(self.loader, DataRng(self.seed))):
            if number == 0:
                self.seen(fingerprint.of_batch(batch))
            count = number + 1
            if self._is_mine(number):
                yield batch
        self.seen(count)

    def _drawn(self, loader: Iterable[Any], draws: DataRng) -> Iterator[Any]:
        """The batches of a loader, which draws random numbers of its own."""
        with draws.lent():
            source = iter(loader)
        while True:
            with draws.lent():
                batch = list(itertools.islice(source, 1))
            if not batch:
                return
            yield batch[0]
