"""Model buffers: after every step all workers hold those of logical worker 0."""

from __future__ import annotations

import torch
from torch import nn

from weft.errors import LoopError
from weft.runtime.loop.logical_workers import Passes


class Buffers:
    """BatchNorm's and other buffers: after every step all workers have those of logical worker 0.

    In a process with several workers, each pass starts from the same buffers.
    """

    def __init__(self, model: nn.Module, workers: int) -> None:
        self._slots = BufferSlots(model, workers)
        self.start = [buffer.clone() for buffer in self.tensors]
        self.first = self.start

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The model's present buffers."""
        return self._slots.tensors

    def pass_ended(self, passes: Passes) -> None:
        """Keep the buffers of the first pass, unless its share is 0; reset them for the next pass."""
        if passes.count == 1 and passes.share > 0:
            return
        if passes.pass_index == 0:
            self.first = [b.clone() for b in (self.tensors if passes.share > 0 else self.start)]
        self._set(self.first if passes.last else self.start)

    def _set(self, values: list[torch.Tensor]) -> None:
        for buffer, value in zip(self.tensors, values, strict=True):
            buffer.copy_(value)

    def settled(self) -> None:
        """All workers now have equal buffers."""
        for mine, buffer in zip(self.start, self.tensors, strict=True):
            mine.copy_(buffer)


class BufferSlots:
    """The places of a model's buffers: a module may replace the tensor of a buffer in every forward."""

    def __init__(self, model: nn.Module, workers: int) -> None:
        self._workers = workers
        self._places: list[tuple[dict[str, torch.Tensor | None], str, str]] = []
        self._tensors: list[torch.Tensor] = []
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not any(buffer is other for other in self._tensors):
                    self._places.append((module._buffers, name, f"{path}.{name}" if path else name))
                    self._tensors.append(buffer)
                    if not buffer.is_contiguous():
                        module._buffers[name] = self._tensors[-1] = buffer.contiguous()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The present buffers, contiguous. Raises LoopError if the shape of one has changed."""
        for at, ((buffers, name, where), known) in enumerate(zip(self._places, self._tensors, strict=True)):
            if (buffer := buffers.get(name)) is not known:
                self._tensors[at] = buffers[name] = _in_place_of(known, buffer, where, self._workers)
        return list(self._tensors)


def _in_place_of(known: torch.Tensor, buffer: torch.Tensor | None, where: str, workers: int) -> torch.Tensor:
    """A buffer that replaces another one: contiguous and detached.

    An integer buffer is equal on all workers. A floating-point one is computed from each worker's own batch.
    """
    if workers > 1 and buffer is not None and (buffer.is_floating_point() or buffer.is_complex()):
        raise LoopError(
            f"buffer {where} was replaced by another tensor, which every worker computes from its own batch; change it "
            "in place, as BatchNorm does, and all workers keep the first one's"
        )
    if buffer is None or buffer.shape != known.shape or buffer.dtype != known.dtype:
        kind = "removed" if buffer is None else f"replaced by one of {tuple(buffer.shape)}, {buffer.dtype}"
        raise LoopError(
            f"buffer {where}, of {tuple(known.shape)} and {known.dtype} in run.distribute(), was {kind}; workers "
            "exchange buffers, so keep its shape and type, or make it a plain attribute"
        )
    return buffer.detach().contiguous()
