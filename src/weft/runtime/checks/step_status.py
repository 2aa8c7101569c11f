"""What must not happen unseen: a value that is not finite on its way into the model, replicas that drift apart.

Each process looks at its workers' gradients before they are exchanged and at the means that come back. What it finds,
whether it was asked to leave, how many steps it has taken, a fingerprint of the batches that were dealt, and now and
then a hash of its parameters go to all others in one small message beside the step's last bucket, so that all of them
act alike and can name who it was.

On a GPU, where an answer would have to be waited for, the same is told one step later (`unread`).
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
"""Steps from one comparison of the replicas' parameters to the next."""
_REMEDY = "lower the learning rate, clip gradients, or use a GradScaler, which skips such a step"


class StepStatus:
    """The findings of one process, step by step."""

    def __init__(self, names: Sequence[str], params: Sequence[Tensor], *, lossless: bool) -> None:
        self.names, self.params = names, params
        self.lossless = lossless
        """Whether means are finite where gradients are: shares add up to 1, so a plain sum of them cannot overflow."""
        self.asked = False
        """Whether this process was asked to leave."""
        self.leaving = False
        """Whether any process was, before the step that is under way: all of them know."""
        self.trouble: str | None = None
        """What is wrong with the gradients of the present step."""
        self.batches = 0
        """The batches that all workers were dealt for the present step, as one number."""
        self._told_to_leave = False
        self._unread = DeferredFiniteCheck()
        self.begin(0)

    def begin(self, step: int) -> None:
        """A new step's gradients come; all processes have heard each other's words about the step before."""
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
        """A worker's gradients, before they are exchanged; what is not finite goes no further.

        `fine`: whoever weighed them has looked already.
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
        """Means, as they came back; returns whether they are finite, where that must be known before they are used."""
        return self.lossless or self._look(members, bucket)

    def _unasked(self, flat: Tensor | None) -> bool:
        """Whether asking would hold up a GPU, and nothing depends on the answer before the update."""
        return self.lossless and flat is not None and flat.is_cuda

    def shield(self, means: Sequence[Means]) -> None:
        """Means are about to be used; on a GPU, those that are not finite become zeros."""
        self._unread.shield([(members, flat) for members, flat in means if self._unasked(flat)])

    @property
    def has_unread(self) -> bool:
        """Whether something may have been found of which nobody has heard yet."""
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
        """What the others need to know."""
        self._look_back()
        return [int(self.asked), self._rank + 1, self._index + 1, self._hash, self.step, 0, self.batches]

    def last_words(self, step: int) -> list[int]:
        """What the others need to know where a process has no more batches."""
        return [int(self.asked), 0, 0, 0, step, 1, 0]

    def _look_back(self) -> None:
        """What a GPU has found in the step before."""
        zeroed, blamed = self._before.read()
        if zeroed is not None:
            self._mean = zeroed
        if blamed is not None:
            self._rank, self._index = blamed

    def judge(self, rows: Sequence[Sequence[int]]) -> None:
        """Everyone's words, the same in every process; raises where processes have gone different ways."""
        self._told_to_leave = any(row[0] for row in rows)
        check_steps([row[4] for row in rows], [bool(row[5]) for row in rows])
        check_batches([row[6] for row in rows])
        found = next((row for row in rows if row[2]), None)
        if found is not None:
            self.trouble = f"worker {found[1] - 1} has a gradient that is not finite, of {self.names[found[2] - 1]}"
        elif self._mean >= 0:
            self.trouble = f"the workers' gradients of {self.names[self._mean]} are finite, but their sum is not"
        hashes = Counter(row[3] for row in rows)
        if len(hashes) > 1:
            usual, count = hashes.most_common(1)[0]
            odd = [process for process, row in enumerate(rows) if row[3] != usual]
            who = f"process {odd[0]} differs" if count > len(odd) else "processes differ"
            raise LoopError(
                f"replicas have drifted apart by step {self.step}: {who} from the others; something other than the "
                "optimizer changes parameters, or memory is faulty: resume from the last checkpoint"
            )

    def mark(self) -> None:
        """Whatever looks for gradients that are not finite, as a GradScaler does, finds one in every process."""
        if self.trouble is not None:
            grad = next(param.grad for param in self.params if param.grad is not None)
            grad[(0,) * grad.dim()] = torch.nan

    def check(self) -> None:
        """Refuse to go on with gradients that are not finite."""
        if self.trouble is not None:
            raise _refusal(self.trouble, self._before.step if self._before.zeroed else self.step)

    def check_alone(self, step: int) -> None:
        """The same where nobody else takes part, just before the update."""
        self.look_back_alone(step)
        grads = {i: _values(p.grad) for i, p in enumerate(self.params) if p.grad is not None}
        self.shield([((i,), grad) for i, grad in grads.items()])
        asked = {i: grad for i, grad in grads.items() if not self._unasked(grad)}
        totals = [_total(grad) for grad in asked.values()]
        if totals and not torch.isfinite(torch.stack(totals)).all():
            found = next((i for i, grad in asked.items() if not torch.isfinite(grad).all()), None)
            if found is not None:
                raise _refusal(f"the gradient of {self.names[found]} is not finite", step)

    def look_back_alone(self, step: int) -> None:
        self._turn_the_page(step)
        self._look_back()
        if self._mean >= 0:
            raise _refusal(f"the gradient of {self.names[self._mean]} is not finite", self._before.step)


def check_steps(steps: Sequence[int], through: Sequence[bool]) -> None:
    """Refuse to go on where processes have taken different numbers of steps, or some have no more batches."""
    if len(set(steps)) > 1:
        fewest, most = steps.index(min(steps)), steps.index(max(steps))
        raise LoopError(
            f"process {fewest} has taken {min(steps)} steps, process {most} {max(steps)}: a step that only some "
            "workers skip leaves replicas that differ; decide by a value that all workers have alike, such as the norm "
            "that run.clip() returns"
        )
    if len(set(through)) > 1:
        raise LoopError(
            f"process {through.index(True)} has no more batches after {steps[0]} steps, process {through.index(False)} "
            "goes on; give run.shard() a loader of the same length in every process, or say own=True"
        )


def check_batches(fingerprints: Sequence[int]) -> None:
    """Refuse to go on where processes deal from different batches."""
    if len(set(fingerprints)) > 1:
        raise LoopError(
            "the loaders of the processes give different batches, so that samples would be used twice or never; build "
            "the loader alike in every process: shuffle by DataLoader(shuffle=True), or with a generator of a fixed "
            "seed (torch.randperm(n, generator=torch.Generator().manual_seed(epoch))); or say own=True"
        )


def _refusal(trouble: str, step: int) -> LoopError:
    return LoopError(f"{trouble}, at step {step + 1}: {_REMEDY}")


def hashed(params: Sequence[Tensor]) -> int:
    """Parameters as one number: their bits, as words of eight bytes, added up, with a weight for each parameter."""
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
    return whole + 1  # 0 stands for none


def finite(flat: Tensor | None) -> bool:
    """Whether there can be no NaN or infinity, in one pass at the speed of memory. Where it says no, look closer."""
    assert flat is not None, "a bucket that is exchanged lies in one piece"
    return bool(torch.isfinite(_total(flat)))


def check_finite(name: str, grad: Tensor, step: int) -> None:
    """Refuse a gradient that would spoil the servers' model."""
    if not (finite(grad) or bool(torch.isfinite(grad).all())):
        raise LoopError(f"the gradient of {name} is not finite at step {step + 1}; servers cannot use that")


def _values(grad: Tensor) -> Tensor:
    return grad.detach()._values() if grad.is_sparse else grad.detach()


def _total(tensor: Tensor) -> Tensor:
    """A sum that NaN and infinity do not survive; it may overflow by itself."""
    return tensor.detach().sum(dtype=torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None)
