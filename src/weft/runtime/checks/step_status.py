"""Detects non-finite values before they reach the model, and replicas that diverge.

Each process checks its workers' gradients before the exchange, and the means after it. It sends its findings, whether
it was asked to terminate, its step count, a fingerprint of the batches and, from time to time, a hash of its parameters
to all others, in one small message with the step's last bucket. All processes thus act alike and can name the cause.

On a GPU, where the host would have to wait, findings are reported one step later (`finite_gpu`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.compression import Bucket
from weft.errors import LoopError
from weft.runtime.checks.finite_gpu import DeferredFiniteCheck, Means

HASH_EVERY = 100
"""Steps between two comparisons of the replicas' parameters."""
_REMEDY = "Lower the learning rate, clip gradients, or use a GradScaler, which skips such a step."


class StepStatus:
    """The findings of one process, step by step."""

    def __init__(self, names: Sequence[str], params: Sequence[Tensor], *, lossless: bool) -> None:
        self.names, self.params = names, params
        self.lossless = lossless
        """Whether finite gradients have a finite mean: shares add up to 1, so a plain sum of them cannot overflow."""
        self.asked = False
        """Whether this process was asked to terminate."""
        self.leaving = False
        """Whether any process was asked to, before the present step; equal in all processes."""
        self.trouble: str | None = None
        """The fault in the gradients of the present step, in words."""
        self.batches = 0
        """A fingerprint of the batches of all workers in the present step."""
        self._told_to_leave = False
        self._unread = DeferredFiniteCheck()
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start a new step; all processes have received the findings of the previous one."""
        self.leaving = self._told_to_leave
        self.trouble = None
        self.batches = 0
        self._rank = self._index = self._mean = -1
        self._turn_the_page(step)
        self._hash = hashed(self.params) if step and step % HASH_EVERY == 0 else 0
        self.step = step

    def _turn_the_page(self, step: int) -> None:
        self._before, self._unread = self._unread, DeferredFiniteCheck(step)

    def given(self, rank: int, members: Sequence[int], bucket: Bucket, fine: bool | None = None) -> None:
        """Check a worker's gradients before they are exchanged. Non-finite ones are not sent.

        `fine`: the result, if it was determined while the gradients were scaled.
        """
        if self._unasked(bucket.flat):
            self._unread.note(rank, members, [piece.grad for piece in bucket.pieces])
            return
        if fine or (fine is None and finite(bucket.flat)):
            return
        for index, piece in zip(members, bucket.pieces, strict=True):
            if not torch.isfinite(piece.grad).all():
                if self._index < 0:
                    self._rank, self._index = rank, index
                piece.grad.zero_()

    def arrived(self, members: Sequence[int], bucket: Bucket) -> bool:
        """Check means after the exchange; returns whether they are finite, if that must be known before their use."""
        return self.lossless or self._look(members, bucket)

    def _unasked(self, flat: Tensor | None) -> bool:
        """Whether a check would stall a GPU, and nothing depends on the result before the update."""
        return self.lossless and flat is not None and flat.is_cuda

    def shield(self, means: Sequence[Means]) -> None:
        """Replace non-finite means on a GPU by zeros, just before they are used."""
        self._unread.shield([(members, flat) for members, flat in means if self._unasked(flat)])

    @property
    def has_unread(self) -> bool:
        """Whether there may be findings that have not been read yet."""
        return bool(self._unread.zeroed)

    def _look(self, members: Sequence[int], bucket: Bucket) -> bool:
        if finite(bucket.flat):
            return True
        for index, piece in zip(members, bucket.pieces, strict=True):
            if not torch.isfinite(piece.mean).all():
                self._mean = index
                return False
        return True

    def words(self) -> list[int]:
        """The message to the other processes."""
        self._look_back()
        return [int(self.asked), self._rank + 1, self._index + 1, self._hash, self.step, 0, self.batches]

    def last_words(self, step: int) -> list[int]:
        """The message of a process that has no more batches."""
        return [int(self.asked), 0, 0, 0, step, 1, 0]

    def _look_back(self) -> None:
        """Read a GPU's findings of the previous step."""
        zeroed, blamed = self._before.read()
        if zeroed is not None:
            self._mean = zeroed
        if blamed is not None:
            self._rank, self._index = blamed

    def judge(self, rows: Sequence[Sequence[int]]) -> None:
        """Evaluate the messages of all processes, equally in each. Raises LoopError if processes have diverged."""
        self._told_to_leave = any(row[0] for row in rows)
        check_steps([row[4] for row in rows], [bool(row[5]) for row in rows])
        check_batches([row[6] for row in rows])
        found = next((row for row in rows if row[2]), None)
        if found is not None:
            self.trouble = f"The gradient of {self.names[found[2] - 1]} on worker {found[1] - 1} is NaN or infinite"
        elif self._mean >= 0:
            self.trouble = f"The workers' gradients of {self.names[self._mean]} are finite, but their sum is not,"
        hashes = Counter(row[3] for row in rows)
        if len(hashes) > 1:
            usual, count = hashes.most_common(1)[0]
            odd = [process for process, row in enumerate(rows) if row[3] != usual]
            who = f"process {odd[0]} differs from the others" if count > len(odd) else "processes differ"
            raise LoopError(
                f"Replicas have diverged by step {self.step}: {who}. Resume from the last checkpoint, and make sure "
                "that only the optimizer changes parameters; if it does, memory may be faulty."
            )

    def mark(self) -> None:
        """Make a gradient non-finite in every process, so that a GradScaler or similar skips the step everywhere."""
        if self.trouble is not None:
            grad = next(param.grad for param in self.params if param.grad is not None)
            grad[(0,) * grad.dim()] = torch.nan

    def check(self) -> None:
        """Raise LoopError if a gradient of the present step is not finite."""
        if self.trouble is not None:
            raise _refusal(self.trouble, self._before.step if self._before.zeroed else self.step)

    def check_alone(self, step: int) -> None:
        """The same for a single worker, just before the update."""
        self.look_back_alone(step)
        grads = {i: _values(p.grad) for i, p in enumerate(self.params) if p.grad is not None}
        self.shield([((i,), grad) for i, grad in grads.items()])
        asked = {i: grad for i, grad in grads.items() if not self._unasked(grad)}
        totals = [_total(grad) for grad in asked.values()]
        if totals and not torch.isfinite(torch.stack(totals)).all():
            found = next((i for i, grad in asked.items() if not torch.isfinite(grad).all()), None)
            if found is not None:
                raise _refusal(f"The gradient of {self.names[found]} is NaN or infinite", step)

    def look_back_alone(self, step: int) -> None:
        self._turn_the_page(step)
        self._look_back()
        if self._mean >= 0:
            raise _refusal(f"The gradient of {self.names[self._mean]} is NaN or infinite", self._before.step)


def check_steps(steps: Sequence[int], through: Sequence[bool]) -> None:
    """Raise LoopError if processes have taken different numbers of steps, or only some have no more batches."""
    if len(set(steps)) > 1:
        fewest, most = steps.index(min(steps)), steps.index(max(steps))
        raise LoopError(
            f"process {fewest} has taken {min(steps)} steps, process {most} {max(steps)}: replicas differ if only some "
            "workers skip a step; decide by a value that is equal on all workers, such as the norm that run.clip() "
            "returns"
        )
    if len(set(through)) > 1:
        raise LoopError(
            f"process {through.index(True)} has no more batches after {steps[0]} steps, process {through.index(False)} "
            "has; give run.shard() a loader of the same length in every process, or pass own=True"
        )


def check_batches(fingerprints: Sequence[int]) -> None:
    """Raise LoopError if the loaders of the processes give different batches."""
    if len(set(fingerprints)) > 1:
        raise LoopError(
            "the loaders of the processes give different batches, so samples would be used twice or never; build "
            "the loader identically in every process: shuffle with DataLoader(shuffle=True), or with a generator of a "
            "fixed seed (torch.randperm(n, generator=torch.Generator().manual_seed(epoch))); or pass own=True"
        )


def _refusal(trouble: str, step: int) -> LoopError:
    return LoopError(f"{trouble} at step {step + 1}. {_REMEDY}")


def hashed(params: Sequence[Tensor]) -> int:
    """A hash of parameters: the sum of their bits as 8-byte words, weighted by parameter."""
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


def finite(flat: Tensor | None) -> bool:
    """Whether all values are certainly finite, in one pass at the speed of memory. False may be an overflow."""
    assert flat is not None, "the memory of an exchanged bucket is contiguous"
    return bool(torch.isfinite(_total(flat)))


def check_finite(name: str, grad: Tensor, step: int) -> None:
    """Raise LoopError for a non-finite gradient, before it reaches the servers' model."""
    if not (finite(grad) or bool(torch.isfinite(grad).all())):
        raise LoopError(
            f"The gradient of {name} is NaN or infinite at step {step + 1}. Lower the learning rate or clip gradients."
        )


def _values(grad: Tensor) -> Tensor:
    return grad.detach()._values() if grad.is_sparse else grad.detach()


def _total(tensor: Tensor) -> Tensor:
    """A sum that is non-finite if any value is; it may also overflow."""
    return tensor.detach().sum(dtype=torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None)
