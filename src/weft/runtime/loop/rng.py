"""Random number streams: one for each logical worker, one for each epoch's data order, and those of the process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def stream_seed(seed: int, rank: int | str) -> int:
    """A seed for one worker's random numbers, or for another purpose that has a name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{rank}".encode(), digest_size=6).digest(), "big")


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch, as every process of a run does at `weft.init()`."""
    torch.manual_seed(seed)
    _seed_python_and_numpy(seed)


def _seed_python_and_numpy(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def rng_state() -> list[torch.Tensor]:
    """The torch random number states of the calling process: CPU, and the current GPU where one is in use."""
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def set_rng_state(state: list[torch.Tensor]) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[1])


@contextmanager
def rng_kept() -> Iterator[None]:
    """Restore all random number states afterwards: torch's, numpy's and Python's."""
    streams, process = rng_state(), process_rng_state()
    try:
        yield
    finally:
        set_rng_state(streams)
        set_process_rng_state(process)


def process_rng_state() -> list[Any]:
    """The state of Python's and numpy's global random numbers: one stream per process, for all of its workers."""
    version, inner, gauss = random.getstate()
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    return [
        (version, torch.tensor(inner), gauss),
        (kind, torch.from_numpy(numpy.asarray(keys, dtype=numpy.int64)), *rest),
    ]


def set_process_rng_state(states: list[Any]) -> None:
    version, inner, gauss = states[0]
    random.setstate((version, tuple(inner.tolist()), gauss))
    kind, keys, *rest = states[1]
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))


class DataRng:
    """Random numbers for reading the data of one epoch: torch's, numpy's and Python's, equal in every process.

    The loop's own random numbers are restored afterwards, so they do not depend on how much data was read.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: list[Any] | None = None

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let a loader draw from these instead of the loop's."""
        loops = _global_states()
        if self._state is None:
            torch.default_generator.manual_seed(self._seed)  # torch.manual_seed would also seed the GPUs
            _seed_python_and_numpy(self._seed)
        else:
            _set_global_states(self._state)
        try:
            yield
        finally:
            self._state = _global_states()
            _set_global_states(loops)


def _global_states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=True)]


def _set_global_states(states: list[Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
