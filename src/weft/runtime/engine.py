"""The engine drives exchanges beside backward: one thread, one timetable, one order of operations on every rank.

Hooks say when a bucket's gradients are complete. The thread goes through the timetable's slots: it waits until the
slot's bucket is ready and its last operation done, and lets the bucket's flows run up to their next operation.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.compression import Context, State
from weft.errors import LoopError
from weft.ops import Flow, Spec
from weft.runtime.clock import Clock, Stamp
from weft.runtime.memory import Memory
from weft.schedule import Timetable
from weft.strategy import Strategy
from weft.transport.collective import Processes, Wire, Works, wait


@dataclass
class Spans:
    """When the parts of one step's exchange began and ended; `wire` by bucket."""

    encode: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    decode: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    wire: list[tuple[int, Stamp, Stamp]] = field(default_factory=list)


class Engine:
    """Exchanges the buckets of one step at a time. `begin`, `ready` for each bucket, `finish`."""

    def __init__(self, strategy: Strategy, transport: Processes, device: torch.device, seed: int) -> None:
        self.compression, self.schedule = strategy.compression, strategy.schedule
        self.transport, self.device, self.seed = transport, device, seed
        self.clock = Clock(device)
        self.states: list[State] = [{} for _ in transport.layout.carried()]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.timetable = Timetable((), ())
        self.spans = Spans()
        self._jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="weft-engine", daemon=True)
        self._thread.start()

    def plan(self, specs: Sequence[Spec]) -> Timetable:
        """The timetable for parameters in the order in which backward finishes them."""
        stages = self.transport.stages(self.compression.rounds(specs, self.transport.layout.workers))
        return self.schedule.timetable(specs, stages)

    def begin(self, memory: Sequence[Memory], step: int) -> None:
        """Start a step's exchange of what lies, or will lie, in each carried worker's memory."""
        if self._busy:
            raise LoopError("the last backward broke off in the middle of its exchange; the run cannot go on")
        self._busy = True
        self.memory = memory
        self.gates = [threading.Event() for _ in self.timetable.buckets]
        self.marks: list[Any] = [None] * len(self.timetable.buckets)
        self.spans = Spans()
        self._jobs.put(step)

    def ready(self, bucket: int) -> None:
        """All carried workers' gradients of this bucket are in place."""
        if self.stream is not None:
            self.marks[bucket] = torch.cuda.current_stream(self.device).record_event()
        self.gates[bucket].set()

    def finish(self) -> None:
        """Wait until every mean is in place."""
        error = self._done.get()
        if error is not None:
            raise error
        self._busy = False
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            step = self._jobs.get()
            try:
                with self._on_stream():
                    self._exchange(step)
            except BaseException as error:
                self._done.put(error)
            else:
                self._done.put(None)

    def _exchange(self, step: int) -> None:
        passages = [_Passage(self, bucket, step) for bucket in range(len(self.timetable.buckets))]
        for slot in self.timetable.slots:
            passages[slot.bucket].advance()
        for passage in passages:
            while not passage.over:
                passage.advance()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()


class _Passage:
    """One bucket on its way: its flows, what is under way, and when."""

    def __init__(self, engine: Engine, bucket: int, step: int) -> None:
        self.engine, self.bucket, self.step = engine, bucket, step
        self.wire: Wire
        self.under_way: Works | None = None
        self.issued: Stamp = None
        self.over = False

    def _flows(self) -> list[Flow[State]]:
        """The exchange of this bucket, once for each carried worker."""
        engine, layout = self.engine, self.engine.transport.layout
        flows = []
        for rank, memory, state in zip(layout.carried(), engine.memory, engine.states, strict=True):
            memory.fill(self.bucket)
            mine = memory.buckets[self.bucket]
            assert mine is not None, "a gate opens when the bucket is full"
            ctx = Context(step=self.step, rank=rank, workers=layout.workers, seed=engine.seed)
            flows.append(engine.compression.exchange(mine, state, ctx))
        return flows

    def advance(self) -> None:
        """Wait for what is under way (at first: for the gradients), then go on to the next operation."""
        if self.over:
            return
        engine, spans = self.engine, self.engine.spans
        if self.under_way is None:
            engine.gates[self.bucket].wait()
            if engine.stream is not None:
                engine.stream.wait_event(engine.marks[self.bucket])
            into = spans.encode
        else:
            wait(self.under_way)
            into = spans.decode
        begun = engine.clock.stamp()
        if self.under_way is None:
            self.wire = engine.transport.drive(self._flows(), tag=self.bucket)
        else:
            spans.wire.append((self.bucket, self.issued, begun))
        try:
            self.under_way = next(self.wire)
        except StopIteration as stop:
            self.over = True
            for state, new in zip(engine.states, stop.value, strict=True):
                state.update(new)
        self.issued = engine.clock.stamp()
        into.append((begun, self.issued))
