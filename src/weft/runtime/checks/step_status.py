"""One small message per step: every process tells every other whether its gradients are finite, and where it stands.

It also carries a termination request, the number of steps taken, a fingerprint of the batches dealt, and every
`replicas.HASH_EVERY` steps a hash of the parameters. It travels beside the step's last bucket, so that all processes
stop, skip, save and leave at the same step, without a collective of their own, and can name the process at fault.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.compression import Bucket
from weft.runtime.checks import replicas
from weft.runtime.checks.finite import finite, refusal
from weft.runtime.checks.finite_gpu import DeferredFiniteCheck, Means


class StepStatus:
    """One process's findings about the step under way, and everybody's about the step before."""

    def __init__(
        self, names: Sequence[str], params: Sequence[Tensor], *, lossless: bool, noun: str = "gradient"
    ) -> None:
        self.names, self.params, self.noun = names, params, noun
        self.lossless = lossless
        """Whether finite gradients have a finite mean: shares add up to 1, so a plain sum of them cannot overflow."""
        self.termination_requested = False
        """Whether this process has received SIGTERM."""
        self.leaving = False
        """Whether any process had, before the step under way: all of them know."""
        self.finding: str | None = None
        """The gradient of the present step that is not finite, in words."""
        self.batches = 0
        """A fingerprint of the batches that all workers were dealt for the present step."""
        self.figures: Sequence[int] = ()
        """Further integers of this process for the message."""
        self.figures_of: Sequence[Sequence[int]] = ()
        """Those of every process, once their messages have arrived."""
        self.leave_next = False
        """Whether any process had, before the last message was sent."""
        self.step = 0
        self._deferred = DeferredFiniteCheck()
        self.begin(0)

    def begin(self, step: int) -> None:
        """A new step's gradients follow; all processes know each other's status of the step before."""
        self.leaving = self.leave_next
        self.finding = None
        self.batches = 0
        self._rank = self._index = self._mean = -1
        self._before, self._deferred = self._deferred, DeferredFiniteCheck(step)
        hashed = step // replicas.HASH_EVERY > self.step // replicas.HASH_EVERY
        self._hash = replicas.parameter_hash(self.params) if hashed else 0
        self.step = step

    # --- findings of this process -----------------------------------------------------------------------------------

    def check_gradients(self, rank: int, members: Sequence[int], bucket: Bucket, fine: bool | None = None) -> None:
        """Look at a worker's gradients before they are exchanged; those that are not finite become zeros.

        `fine` is the result of an earlier look, made while the gradients were multiplied by their share.
        """
        if self._is_deferred(bucket.flat):
            self._deferred.note(rank, members, [piece.grad for piece in bucket.pieces])
            return
        if fine or (fine is None and finite(bucket.flat)):
            return
        for index, piece in zip(members, bucket.pieces, strict=True):
            if not torch.isfinite(piece.grad).all():
                if self._index < 0:
                    self._rank, self._index = rank, index
                piece.grad.zero_()

    def check_means(self, members: Sequence[int], bucket: Bucket) -> bool:
        """Look at means that came back. Returns whether they are finite, where an update depends on the answer."""
        if self.lossless or finite(bucket.flat):
            return True
        for index, piece in zip(members, bucket.pieces, strict=True):
            if not torch.isfinite(piece.mean).all():
                self._mean = index
                return False
        return True

    def shield(self, means: Sequence[Means]) -> None:
        """Just before an update: on a GPU, means that are not finite become zeros."""
        self._deferred.shield([(members, flat) for members, flat in means if self._is_deferred(flat)])

    def _is_deferred(self, flat: Tensor | None) -> bool:
        """Whether an immediate answer would stall a GPU, and nothing depends on it before the update."""
        return self.lossless and flat is not None and flat.is_cuda

    @property
    def has_unread(self) -> bool:
        """Whether a GPU may have found something that no process has read yet."""
        return bool(self._deferred.zeroed)

    # --- the message ------------------------------------------------------------------------------------------------

    def message(self) -> list[int]:
        """This process's status, for all others."""
        zeroed, blamed = self._before.read()
        if zeroed is not None:
            self._mean = zeroed
        if blamed is not None:
            self._rank, self._index = blamed
        leave = int(self.termination_requested)
        return [leave, self._rank + 1, self._index + 1, self._hash, self.step, 0, self.batches, *self.figures]

    def last_message(self, step: int) -> list[int]:
        """The status of a process that has no more batches."""
        return [int(self.termination_requested), 0, 0, 0, step, 1, 0, *[0 for _ in self.figures]]

    def judge(self, rows: Sequence[Sequence[int]]) -> None:
        """Everybody's messages, the same in every process. Raises where processes have diverged."""
        self.leave_next = any(row[0] for row in rows)
        replicas.check_steps([row[4] for row in rows], [bool(row[5]) for row in rows])
        replicas.check_batches([row[6] for row in rows])
        self.figures_of = [row[7:] for row in rows]
        found = next((row for row in rows if row[2]), None)
        if found is not None:
            self.finding = f"The {self.noun} of {self.names[found[2] - 1]} on worker {found[1] - 1} is NaN or infinite"
        elif self._mean >= 0:
            self.finding = f"The workers' {self.noun}s of {self.names[self._mean]} are finite, but their sum is not,"
        replicas.check_hashes([row[3] for row in rows], self.step)

    # --- consequences -----------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Let a GradScaler, which looks for itself, find a NaN in every process where one has found any."""
        if self.finding is not None:
            grad = next(param.grad for param in self.params if param.grad is not None)
            grad[(0,) * grad.dim()] = torch.nan

    def check(self) -> None:
        """Refuse to continue with gradients that are not finite."""
        if self.finding is not None:
            raise refusal(self.finding, self._before.step if self._before.zeroed else self.step)
