"""Memory of one worker's gradients between backward and step, by bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.compression import Bucket, Piece
from weft.ops import Spec
from weft.runtime.checks.finite import finite
from weft.schedule import Timetable


class BucketMemory:
    """A bucket of several parameters has its own memory; a bucket of one uses the gradient that autograd allocated.

    Parameters are identified by their index in the model; `members[b]` are the indices of bucket b.
    """

    def __init__(
        self, timetable: Timetable, members: Sequence[Sequence[int]], params: Sequence[Tensor], *, leads: bool
    ) -> None:
        self.params, self.members = params, members
        self.leads = leads  # `.grad` follows the bucket; true for the last of several logical workers in a process
        self._waiting: dict[int, tuple[Tensor, float]] = {}
        self.factors: dict[int, tuple[Tensor, Tensor]] = {}
        """The factors of gradients, if the compressor needs them."""
        self.looked_at: dict[int, bool] = {}
        """Whether a gradient is finite, if that was determined while it was scaled."""
        self.single_parameter: dict[int, tuple[int, Spec]] = {}
        """By parameter with a bucket to itself: that bucket."""
        self.buckets: list[Bucket | None] = [None] * len(members)
        self._views: dict[int, Tensor] = {}
        self._values = {i: _flat(params[i]) for inside in members for i in inside}
        for b, (group, inside) in enumerate(zip(timetable.buckets, members, strict=True)):
            if len(inside) == 1:
                self.single_parameter[inside[0]] = b, group[0]
                continue
            sizes = [spec.numel for spec in group]
            flat = torch.zeros(sum(sizes), dtype=group[0].dtype, device=params[inside[0]].device)
            parts = flat.split(sizes)
            self._views |= {i: _shaped(part, params[i]) for i, part in zip(inside, parts, strict=True)}
            pieces = [
                Piece(spec, part, part, value=self._values[i])
                for spec, part, i in zip(group, parts, inside, strict=True)
            ]
            self.buckets[b] = Bucket(tuple(pieces), flat)

    def holds(self, index: int, grad: Tensor) -> bool:
        """Whether this gradient is already in its bucket."""
        view = self._views.get(index)
        return view is not None and view.data_ptr() == grad.data_ptr()

    def view(self, index: int) -> Tensor:
        """The gradient of a parameter, as a view of its bucket."""
        return self._views[index]

    def contents(self, bucket: int) -> tuple[Sequence[int], Tensor | None]:
        """The parameters of a bucket, and the memory of their gradients."""
        there = self.buckets[bucket]
        return self.members[bucket], there.flat if there is not None else None

    def handed(self, bucket: int) -> Bucket:
        """A full bucket, in the form that an exchange takes."""
        there = self.buckets[bucket]
        assert there is not None, "a bucket is ready once it is full"
        if not self.factors:
            return there
        found = [self.factors.pop(i, None) for i in self.members[bucket]]
        for factor in (factor for pair in found if pair for factor in pair if factor.is_cuda):
            factor.record_stream(torch.cuda.current_stream())
        pieces = zip(there.pieces, found, strict=True)
        return Bucket(tuple(replace(piece, factors=pair) for piece, pair in pieces), there.flat)

    def put(self, index: int, grad: Tensor, share: float) -> None:
        """Scale a gradient by a share and put it into its bucket, in one pass (none for a bucket of one and share 1).

        A bucket of several parameters is filled later, all at once: `fill`.
        """
        if index not in self.single_parameter:
            self._waiting[index] = grad, share
            return
        if not self.holds(index, grad):
            self.take(index, grad if _alike(grad, self.params[index]) else _fresh(self.params[index]).copy_(grad))
        view = self._views[index]
        if share == 0.0:
            view.zero_()
        elif share != 1.0 and view.dtype in LOOKED_AT and not view.is_cuda:
            self.looked_at[index] = weigh(view, share)
        elif share != 1.0:
            view.mul_(share)

    def fill(self, bucket: int) -> None:
        """Copy pending gradients into the bucket's memory, and point `.grad` to it.

        On a CPU the thread of backward does this as soon as the bucket is full: all compute cores take part, and the
        gradients are still in their caches. On a GPU the engine does it, on its own stream.
        """
        waiting = [index for index in self.members[bucket] if index in self._waiting]
        for index in waiting:
            grad, share = self._waiting.pop(index)
            view = self._views[index]
            if share == 0.0:
                view.zero_()
            else:
                torch.mul(grad, share, out=view)
            if grad.is_cuda:
                grad.record_stream(torch.cuda.current_stream())
            if self.leads:
                self.params[index].grad = view
        _, flat = self.contents(bucket)
        if waiting and flat is not None and not flat.is_cuda:
            self.looked_at[self.members[bucket][0]] = finite(flat)

    def zero(self, index: int) -> None:
        """Set a missing gradient to zero."""
        if index in self.single_parameter and index not in self._views:
            self.take(index, _fresh(self.params[index]))
        self._views[index].zero_()

    def take(self, index: int, grad: Tensor) -> None:
        """Use a gradient's own memory as its bucket."""
        b, spec = self.single_parameter[index]
        flat = grad.as_strided((grad.numel(),), (1,))
        self._views[index] = grad
        if self.leads and self.params[index].grad is not None:
            self.params[index].grad = grad
        self.buckets[b] = Bucket((Piece(spec, flat, flat, value=self._values[index]),), flat)

    def release(self) -> None:
        """Release memory that autograd allocated, so that it can be reused."""
        for index, (b, _) in self.single_parameter.items():
            self._views.pop(index, None)
            self.buckets[b] = None


LOOKED_AT = (torch.float32, torch.bfloat16, torch.float16)


def weigh(grad: Tensor, share: float) -> bool:
    """Multiply by a share, and return whether all values are finite, in one pass over memory."""
    found = torch.zeros(1, dtype=torch.float32)
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.tensor(share, dtype=torch.float32))
    return not found.item()


def _shaped(part: Tensor, param: Tensor) -> Tensor:
    """A range of a bucket as a gradient, with its parameter's strides if those are dense, as autograd expects."""
    return part.as_strided(param.shape, param.stride()) if _dense(param) else part.view(param.shape)


def _flat(param: Tensor) -> Tensor | None:
    """A parameter's memory as a flat tensor, in the order of its gradient in a bucket; None if it is not dense."""
    return param.detach().as_strided((param.numel(),), (1,)) if _dense(param) else None


def _fresh(param: Tensor) -> Tensor:
    return _shaped(torch.zeros(param.numel(), dtype=param.dtype, device=param.device), param)


def _alike(grad: Tensor, param: Tensor) -> bool:
    """Whether a gradient is dense memory in the layout that every rank uses for this parameter."""
    return _dense(param) and grad.stride() == param.stride() and grad.dtype == param.dtype and not grad.is_conj()


def _dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
