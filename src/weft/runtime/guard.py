"""What must not happen unseen: a value that is not finite on its way into the model, replicas that drift apart.

Each process looks at its workers' gradients before they are exchanged and at the means that come back. What it finds,
whether it was asked to leave, and now and then a hash of its parameters go to all others in one small message beside
the step's last bucket, so that all of them act alike and can name who it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from weft.compression import Bucket
from weft.errors import LoopError

HASH_EVERY = 100
"""Steps from one comparison of the replicas' parameters to the next."""
_REMEDY = "lower the learning rate, clip gradients, or use a GradScaler, which skips such a step"


class Guard:
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
        self._told_to_leave = False
        self.begin(0)

    def begin(self, step: int) -> None:
        """A new step's gradients come; all processes have heard each other's words about the step before."""
        self.leaving = self._told_to_leave
        self.trouble = None
        self._rank = self._index = self._mean = -1
        self._sizes: list[tuple[int, Sequence[int], Tensor]] = []
        self._means: list[tuple[Sequence[int], Bucket, Tensor]] = []
        self._hash = hashed(self.params) if step and step % HASH_EVERY == 0 else 0
        self.step = step

    def given(self, rank: int, members: Sequence[int], bucket: Bucket, fine: bool | None = None) -> None:
        """A worker's gradients, before they are exchanged; what is not finite goes no further.

        `fine`: whoever weighed them has looked already.
        """
        if self._later(bucket):
            self._sizes.append((rank, members, _sizes(bucket)))
            return
        if fine or (fine is None and _finite(bucket.flat)):
            return
        for index, piece in zip(members, bucket.pieces, strict=True):
            if not torch.isfinite(piece.grad).all():
                if self._index < 0:
                    self._rank, self._index = rank, index
                piece.grad.zero_()

    def arrived(self, members: Sequence[int], bucket: Bucket) -> bool | Tensor:
        """Means, as they came back; returns whether they are finite."""
        if self._later(bucket):
            assert bucket.flat is not None
            self._means.append((members, bucket, torch.isfinite(_total(bucket.flat))))
            return self._means[-1][2]
        return self.lossless or self._look(members, bucket)

    def _later(self, bucket: Bucket) -> bool:
        """Whether asking now would hold up a GPU, and nothing depends on it yet."""
        return self.lossless and bucket.flat is not None and bucket.flat.is_cuda

    def _look(self, members: Sequence[int], bucket: Bucket) -> bool:
        if _finite(bucket.flat):
            return True
        for index, piece in zip(members, bucket.pieces, strict=True):
            if not torch.isfinite(piece.mean).all():
                self._mean = index
                return False
        return True

    def words(self) -> list[int]:
        """What the others need to know."""
        for rank, members, sizes in self._sizes:
            if self._index < 0 and not bool(torch.isfinite(sizes).all()):
                self._rank, self._index = rank, members[int(torch.isfinite(sizes).long().argmin())]
        return [int(self.asked), self._rank + 1, self._index + 1, self._hash]

    def judge(self, rows: Sequence[Sequence[int]]) -> None:
        """Everyone's words, the same in every process; raises where replicas have drifted apart."""
        self._told_to_leave = any(row[0] for row in rows)
        if self._means and not bool(torch.stack([fine for _, _, fine in self._means]).all()):
            for members, bucket, _ in self._means:
                self._look(members, bucket)
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
            raise refusal(self.trouble, self.step)


def refusal(trouble: str, step: int) -> LoopError:
    return LoopError(f"{trouble}, at step {step + 1}: {_REMEDY}")


def hashed(params: Sequence[Tensor]) -> int:
    """Parameters as one number: their bits, as words of eight bytes, added up, with a weight for each parameter."""
    whole = 0
    with torch.no_grad():
        for param in params:
            flat = param.detach().contiguous().view(-1).view(torch.uint8)
            flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()
            words = flat.numel() // 8 * 8
            total = int(flat[:words].view(torch.int64).sum()) + int(flat[words:].sum())
            whole = (whole * 31 + total) % 2**62
    return whole + 1  # 0 stands for none


def not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first parameter whose gradient is not finite."""
    grads = [(name, param.grad) for name, param in named if param.grad is not None]
    totals = [_total(grad) for _, grad in grads]
    if not totals or bool(torch.isfinite(torch.stack(totals)).all()):
        return None
    return next((name for name, grad in grads if not torch.isfinite(grad).all()), None)


def _finite(flat: Tensor | None) -> bool:
    """Whether there can be no NaN or infinity, in one pass at the speed of memory. Where it says no, look closer."""
    assert flat is not None, "a bucket that is exchanged lies in one piece"
    return bool(torch.isfinite(_total(flat)))


def _sizes(bucket: Bucket) -> Tensor:
    """For each parameter a number that is finite where its gradient is: the sum of its absolute values."""
    grads = [piece.grad for piece in bucket.pieces]
    half = torch.float32 if grads[0].dtype in (torch.float16, torch.bfloat16) else None
    return torch.stack(torch._foreach_norm(grads, 1, half))


def _total(tensor: Tensor) -> Tensor:
    """A sum that NaN and infinity do not survive; it may overflow by itself."""
    return tensor.detach().sum(dtype=torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None)
