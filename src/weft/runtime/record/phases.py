"""Stamps of a step's phases, taken where they happen and handed to the recorder as whole steps."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from weft.runtime.record.clock import Clock, Spans, Stamp
from weft.runtime.record.events import Recorder, Values


class SpanSource(Protocol):
    """Provides the intervals in which gradients were on the wire."""

    @property
    def spans(self) -> Spans: ...


class ByteCounter(Protocol):
    """Counts the bytes of sent gradients."""

    @property
    def sent_bytes(self) -> float: ...


class PhaseTimer:
    """Measures the phases of a step and passes finished steps to a recorder. Without one it does nothing."""

    def __init__(self, clock: Clock, recorder: Recorder | None) -> None:
        self.clock, self.recorder = clock, recorder
        self.engine: SpanSource | None = None
        self.sender: ByteCounter | None = None
        self.values: Values = {}
        self._handed_over = False
        self.waited: list[tuple[Stamp, Stamp]] = []
        self.updates: list[tuple[Stamp, Stamp]] = []
        self._reset(clock.stamp())

    def observe(self, engine: SpanSource, sender: ByteCounter) -> None:
        """Take the exchange's spans and the bytes sent from these, from here on."""
        self.engine, self.sender = engine, sender

    def attach(self, model: nn.Module) -> None:
        """Stamp the forwards of a model in training; a compiled model's are not stamped."""
        if self.recorder and not hasattr(model, "_orig_mod"):
            model.register_forward_pre_hook(lambda module, _: self.forward_began() if _stamped(module) else None)
            model.register_forward_hook(lambda module, *_: self.forward_ended() if _stamped(module) else None)

    def _reset(self, began: Stamp) -> None:
        self.began = began
        self.forward: list[Stamp] = []
        self.backward: list[tuple[Stamp, Stamp]] = []
        self.save_s: float | None = None
        self.late, self.late_updates = self.waited, self.updates
        """Waits from now on may still belong to the previous step."""
        self.waited, self.updates = [], []
        self._bytes = self.sender.sent_bytes if self.sender else 0.0

    def log(self, values: dict[str, Any], share: float) -> None:
        """Add values of the present step, from a worker with this share of its samples."""
        for key, value in values.items():
            self.values.setdefault(key, []).append((share, value))

    def _fresh(self) -> None:
        """Start a new step's values."""
        if self._handed_over:
            self.values, self._handed_over = {}, False

    def forward_began(self, *_: Any) -> None:
        self._fresh()
        if self.recorder:
            self.forward.append(self.clock.stamp())

    def forward_ended(self, *_: Any) -> None:
        if self.recorder:
            self.forward.append(self.clock.stamp())

    def backward_ended(self) -> None:
        self._fresh()
        if self.recorder:
            start = self.forward[-1] if self.forward else self.began
            self.backward.append((start, self.clock.stamp()))

    def exchange_ended(self) -> None:
        if self.recorder and self.backward:
            self.waited.append((self.backward[-1][1], self.clock.stamp()))

    def held_up_by_merge(self, began: Stamp) -> None:
        """The loop has sent or used merges after the optimizer's step."""
        if self.recorder:
            self.waited.append((began, self.clock.stamp()))

    def held_up(self, began: Stamp) -> None:
        """The loop has waited for the update of a parameter, which belongs to the previous step."""
        if self.recorder:
            self.late.append((began, self.clock.stamp()))

    def updated(self, began: Stamp) -> None:
        """Some parameters were updated, as part of the previous step."""
        if self.recorder:
            self.late_updates.append((began, self.clock.stamp()))

    def saved(self, held_up_s: float) -> None:
        """A checkpoint was taken before the next step."""
        self.save_s = held_up_s

    def optimizer_began(self) -> None:
        self._fresh()
        if self.recorder:
            self.stepping = self.clock.stamp()
            if not self.backward and self.forward:  # a single worker: without an exchange, backward's end is unknown
                self.backward.append((self.forward[-1], self.stepping))

    def step_ended(self, step: int, samples: int) -> None:
        """The optimizer has stepped. Values of this step are accepted until the next one begins."""
        if self.recorder is None:
            return
        ended = self.clock.stamp()
        spans = self.engine.spans if self.engine else Spans()
        sent = self.sender.sent_bytes - self._bytes if self.sender else 0.0
        stamps = {
            "forward": list(zip(self.forward[::2], self.forward[1::2], strict=False)),
            "backward": self.backward,
            "waited": self.waited,
            "optimizer": [(self.stepping, ended)],
            "update": self.updates,
            "encode": spans.encode,
            "decode": spans.decode,
            "wire": spans.wire,
            "step": [(self.began, ended)],
        }
        self._handed_over = True
        if self.save_s is not None:
            self.values["save_s"] = [(1.0, self.save_s)]
        self.recorder.add(step, stamps, sent, samples, self.values)
        self._reset(ended)


def _stamped(module: nn.Module) -> bool:
    """Whether this forward is one of training, and not traced: `torch.compile` traces hooks, too, but no clock."""
    return module.training and not torch.compiler.is_compiling()
