"""Processes that train one model must agree: on its bits, on the number of steps, and on the batches they deal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.errors import LoopError

HASH_EVERY = 100
"""Steps from one comparison of the replicas' parameters to the next."""


def parameter_hash(params: Sequence[Tensor]) -> int:
    """One number for the bits of all parameters: words of eight bytes, summed, with a weight for each parameter."""
    totals = []
    with torch.no_grad():
        for param in params:
            flat = param.detach().contiguous().view(-1).view(torch.uint8)
            flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()
            words = flat.numel() // 8 * 8
            totals.append(flat[:words].view(torch.int64).sum() + flat[words:].sum())
        whole = 0
        for total in torch.stack(totals).tolist() if totals else []:
            whole = (whole * 31 + total) % 2**62
    return whole + 1  # 0 means no hash


def check_hashes(hashes: Sequence[int], step: int) -> None:
    """Refuse to continue where replicas have drifted apart."""
    counts = Counter(hashes)
    if len(counts) == 1:
        return
    usual, count = counts.most_common(1)[0]
    odd = [process for process, each in enumerate(hashes) if each != usual]
    which = f"process {odd[0]} differs from the others" if count > len(odd) else "processes differ"
    raise LoopError(
        f"Replicas have diverged by step {step}: {which}. Resume from the last checkpoint, and make sure that only the "
        "optimizer changes parameters; if it does, memory may be faulty."
    )


def check_steps(steps: Sequence[int], finished: Sequence[bool]) -> None:
    """Refuse to continue where processes have taken different numbers of steps, or some have no more batches."""
    if len(set(steps)) > 1:
        fewest, most = steps.index(min(steps)), steps.index(max(steps))
        raise LoopError(
            f"process {fewest} has taken {min(steps)} steps, process {most} {max(steps)}: replicas differ if only some "
            "workers skip a step; decide by a value that is equal on all workers, such as the norm that run.clip() "
            "returns"
        )
    if len(set(finished)) > 1:
        raise LoopError(
            f"process {finished.index(True)} has no more batches after {steps[0]} steps, process "
            f"{finished.index(False)} has; give run.shard() a loader of the same length in every process, or pass "
            "own=True"
        )


def check_batches(fingerprints: Sequence[int]) -> None:
    """Raise LoopError if the loaders of the processes give different batches."""
    if len(set(fingerprints)) > 1:
        raise LoopError(
            "the loaders of the processes give different batches, so samples would be used twice or never; build "
            "the loader identically in every process: shuffle with DataLoader(shuffle=True), or with a generator of a "
            "fixed seed (torch.randperm(n, generator=torch.Generator().manual_seed(epoch))); or pass own=True"
        )
