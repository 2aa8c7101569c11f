"""The servers' model, pulled into the memory of a worker's parameters.

Under a deferring schedule a pull is pending after `begin`, and the first access to a parameter waits for its values
(`engine/lazy_parameter`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import final

from torch import Tensor

from weft.runtime.engine.lazy_parameter import LazyParameter, make_lazy, make_ready
from weft.runtime.record.phases import PhaseTimer
from weft.runtime.server.client import PulledModel, ServerClient
from weft.runtime.server.gpu_client import GpuPull, GpuServerClient


@final
class ModelPull:
    """The pulls of one worker: `begin`, and complete after `finish`; at most one is pending."""

    def __init__(
        self,
        client: ServerClient | GpuServerClient,
        named: Mapping[str, Tensor],
        flat: Mapping[str, Tensor],
        phases: PhaseTimer,
        timeout_s: float,
        *,
        stepped: Container[int],
        defers: bool,
        early: bool,
        received: Callable[[str], None],
    ) -> None:
        self.client, self.named, self.flat, self.phases, self.timeout_s = client, named, flat, phases, timeout_s
        self.defers = defers
        self.coming = client.receive_memory(flat) if early else None
        """The next step's parameters, while backward still needs this one's."""
        self.cleared = True
        """Whether `zero_grad` was called since the last pull that deferred."""
        self._stepped = stepped
        """The optimizer's parameters, by identity."""
        self._received = received
        """Called with the name of a parameter whose values are in its memory."""
        self._name_of = {id(p): name for name, p in named.items()}
        self._pulled: PulledModel | GpuPull | None = None

    def begin(self, buffers: Sequence[Tensor]) -> None:
        """Pull the model. Where updates are deferred, buffers are in place when this returns, and gradients cleared."""
        self._pulled = self.client.pull(self.flat, buffers)
        if not self.defers:
            return
        self._pulled.wait_for_buffers(self.timeout_s)
        self.cleared = False
        for p in self.named.values():
            if id(p) in self._stepped:
                p.grad = None
            make_lazy(p, self._touched)

    def clear(self) -> bool:
        """`zero_grad()`. Returns whether gradients are cleared already, so that pending parameters stay untouched."""
        self.cleared = True
        return self.defers and self._pulled is not None

    def finish(self) -> PulledModel | GpuPull | None:
        """Wait for the whole model; returns the pull that was pending, if there was one."""
        pulled, self._pulled = self._pulled, None
        if pulled is None:
            return None
        for name, p in self.named.items():
            if not self.defers or type(p) is LazyParameter:
                self._enter(name, pulled)
                make_ready(p)
        pulled.wait(self.timeout_s)
        return pulled

    def _touched(self, param: LazyParameter) -> None:
        assert self._pulled is not None
        began = self.phases.clock.stamp()
        if self._enter(self._name_of[id(param)], self._pulled):
            self.phases.held_up(began)
        make_ready(param)

    def _enter(self, name: str, pulled: PulledModel | GpuPull) -> bool:
        """Wait for a parameter, and put its values into the model. Returns whether they had not arrived yet."""
        early = pulled.wait_for(name, self.timeout_s)
        if self.coming is not None:
            self.flat[name].copy_(self.coming[name])
        self._received(name)
        return early
