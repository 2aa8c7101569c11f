"""The server client of a worker with a model on a GPU: transfers go through pinned memory, parallel to compute.

A gradient is copied to the host on a separate stream as soon as backward has finished it; a thread waits for the copy
and pushes it. Pulled values are copied to the GPU on the loop's own stream, on which forward reads them. The loop thus
waits for messages, as on a CPU, but never for a copy.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.compression import State
from weft.runtime.checks.finite import check_gradient
from weft.runtime.record.clock import Spans
from weft.runtime.server.client import PulledModel, ServerClient
from weft.runtime.server.protocol import Hyper
from weft.threads import start_serial_thread


@dataclass
class GpuPull:
    """A pull in progress, into pinned memory and on to the GPU; each value is copied once."""

    pulled: PulledModel
    owner: GpuServerClient
    buffers: Sequence[Tensor]

    def __post_init__(self) -> None:
        self._above = set(self.pulled.replies)
        self._buffers_above = bool(self.buffers)

    def wait_for(self, name: str, timeout_s: float) -> bool:
        """Make the current stream wait until a parameter is in place. Returns whether it was pending."""
        early = self.pulled.wait_for(name, timeout_s)
        if name in self._above:
            self._above.remove(name)
            self.owner.land(name)
        return early

    def wait_for_buffers(self, timeout_s: float) -> None:
        """The same for the model's buffers."""
        self.pulled.wait_for_buffers(timeout_s)
        if self._buffers_above:
            self._buffers_above = False
            self.owner.land_buffers(self.buffers)

    def wait(self, timeout_s: float) -> None:
        """The same for the whole model."""
        for name in self.pulled.replies:
            self.wait_for(name, timeout_s)
        self.wait_for_buffers(timeout_s)

    @property
    def leaving(self) -> bool:
        return self.pulled.leaving


class GpuServerClient:
    """The counterpart of `ServerClient` for the flat parameters of a model on a GPU."""

    def __init__(
        self, inner: ServerClient, model: Mapping[str, Tensor], buffers: Sequence[Tensor], timeout_s: float
    ) -> None:
        self.inner, self._model, self._timeout_s = inner, model, timeout_s
        self._values = {name: _pinned(flat) for name, flat in model.items()}
        self._grads = {name: _pinned(flat) for name, flat in model.items()}
        self._buffers = [_pinned(buffer) for buffer in buffers]
        self._stream = torch.cuda.Stream()
        self._landed = torch.cuda.Event()
        self._error: Exception | None = None
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        start_serial_thread(self._do, "weft-pinned")

    # --- the interface of ServerClient ------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self.inner.state

    @state.setter
    def state(self, state: State) -> None:
        self.inner.state = state

    @property
    def spans(self) -> Spans:
        """Empty: these spans have host timestamps, and all others here GPU timestamps."""
        return Spans()

    @property
    def sent_bytes(self) -> float:
        return self.inner.sent_bytes

    def receive_memory(self, model: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Values that arrive early wait in pinned memory, not on the GPU."""
        return model

    def join(self, timeout_s: float) -> tuple[int, bool]:
        return self.inner.join(timeout_s)

    def start(
        self, model: Mapping[str, Tensor], state: Mapping[str, Any], buffers: Sequence[Tensor], timeout_s: float
    ) -> None:
        for name, flat in model.items():
            self._values[name].copy_(flat)
        for pinned, buffer in zip(self._buffers, buffers, strict=True):
            pinned.copy_(buffer)
        self.inner.start(self._values, state, self._buffers, timeout_s)

    def begin(
        self,
        step: int,
        share: float,
        hyper: Hyper,
        buffers: Sequence[Tensor] = (),
        *,
        leave: bool = False,
    ) -> None:
        """Announce the gradients of a step, once those of the previous step have been sent."""
        self._settle()
        self.inner.pushed(self._timeout_s)
        said = [(pinned, buffer) for pinned, buffer in zip(self._buffers, buffers, strict=False)]
        copied = self._copied(said)

        def begin() -> None:
            self._landed.synchronize()  # now replies may overwrite the pinned memory
            copied.synchronize()
            self.inner.begin(step, share, hyper, [pinned for pinned, _ in said], leave=leave)

        self._work.put(begin)

    def push(self, name: str, grad: Tensor | None, step: int, into: Mapping[str, Tensor] | None = None) -> None:
        """Push a gradient, once it is on the host."""
        pinned = self._grads[name] if grad is not None else None
        copied = self._copied([(pinned, grad)] if pinned is not None and grad is not None else [])

        def push() -> None:
            copied.synchronize()
            if pinned is not None:
                check_gradient(name, pinned, step)
            self.inner.push(name, pinned, step, self._values if into is not None else None)

        self._work.put(push)

    def pushed(self, timeout_s: float) -> None:
        self._settle()
        self.inner.pushed(timeout_s)

    def pull(self, model: Mapping[str, Tensor], buffers: Sequence[Tensor] = ()) -> GpuPull:
        self._settle()
        return GpuPull(self.inner.pull(self._values, self._buffers), self, buffers)

    def fetch(self, timeout_s: float) -> dict[str, dict[str, Any]]:
        self._settle()
        return self.inner.fetch(timeout_s)

    def tell(self, values: Sequence[Any], timeout_s: float) -> list[Any]:
        return self.inner.tell(values, timeout_s)

    def leave(self, timeout_s: float) -> None:
        self._work.put(None)
        self.inner.leave(timeout_s)

    def close(self) -> None:
        self._work.put(None)
        self.inner.close()

    # --- copies -----------------------------------------------------------------------------------------------------

    def _copied(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Copy results of the current stream to the host; the event is recorded after the copies."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for pinned, values in pairs:
                pinned.copy_(values, non_blocking=True)
                values.record_stream(self._stream)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return copied

    def land(self, name: str) -> None:
        """Copy a parameter to the GPU, ahead of later work on the current stream."""
        self._model[name].copy_(self._values[name], non_blocking=True)
        self._landed.record()

    def land_buffers(self, buffers: Sequence[Tensor]) -> None:
        for buffer, pinned in zip(buffers, self._buffers, strict=True):
            buffer.copy_(pinned, non_blocking=True)
        self._landed.record()

    # --- the thread that waits for copies ---------------------------------------------------------------------------

    def _do(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                if self._error is None:
                    work()
            except Exception as error:  # re-raised in the loop's thread
                self._error = error
            finally:
                self._work.task_done()

    def _settle(self) -> None:
        """Wait until all queued work is done."""
        self._work.join()
        if self._error is not None:
            raise self._error


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
