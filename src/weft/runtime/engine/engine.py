"""The engine runs exchanges in parallel to backward and to the next forward: one thread, one order on every rank.

Hooks report when the gradients of a bucket are complete. The engine's thread runs each bucket's exchange up to its next
collective, cuts that into the parts of the timetable, and issues them in the timetable's order. Once all parts are
complete, the exchange continues with their joined result, until the mean is in place.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from weft.compression import Context, State
from weft.errors import LoopError
from weft.ops import Round, Spec
from weft.profile import Measured
from weft.runtime.checks.step_status import StepStatus
from weft.runtime.engine.buckets import BucketMemory
from weft.runtime.engine.issue_order import IssueOrder
from weft.runtime.record.clock import Clock, Spans, Stamp
from weft.schedule import Slot, Timetable
from weft.strategy import Strategy
from weft.threads import start_serial_thread
from weft.transport.collective import Processes, Wire, Works
from weft.transport.payloads import cut, joined


class Engine:
    """Exchanges the buckets of one step at a time: `begin`, `ready` for each bucket, `wait` for one bucket at a time,
    then `finish`."""

    def __init__(
        self,
        strategy: Strategy,
        transport: Processes,
        device: torch.device,
        seed: int,
        *,
        clock: Clock,
        status: StepStatus,
        momentum: float = 0.0,
    ) -> None:
        self.compression, self.schedule = strategy.compression, strategy.schedule
        self.transport, self.device, self.seed = transport, device, seed
        self.clock, self.status, self.momentum = clock, status, momentum
        self.states: list[State] = [{} for _ in transport.layout.carried()]
        self.scratch_memory: dict[Any, torch.Tensor] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.timetable = Timetable((), ())
        self.spans = Spans()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._under_way = False
        self._error: BaseException | None = None
        self._thread = start_serial_thread(self._run, "weft-engine")

    def lay_out(self, specs: Sequence[Spec], measured: Measured | None = None) -> Timetable:
        """Make the timetable for parameters in the order in which backward finishes them, and follow it from here."""
        self.scratch_memory = {}
        self.timetable = self.schedule.timetable(specs, self.rounds, measured)
        return self.timetable

    def restore(self, states: Sequence[State]) -> None:
        """Continue with these compressor states, of each logical worker of this process."""
        self.states[:] = [
            {name: {key: kept.to(self.device) for key, kept in own.items()} for name, own in state.items()}
            for state in states
        ]

    def follow(self, timetable: Timetable) -> None:
        """Follow a timetable made before; between two exchanges."""
        self.timetable = timetable

    def take_spans(self) -> Spans:
        """The spans since the last call. An exchange may span several steps."""
        spans, self.spans = self.spans, Spans()
        return spans

    def rounds(self, specs: Sequence[Spec]) -> tuple[Round, ...]:
        """The rounds of a bucket of these parameters."""
        return self.compression.rounds([spec.real() for spec in specs], self.transport.layout.workers)

    # --- in the loop's thread ---------------------------------------------------------------------------------------

    def begin(self, memory: Sequence[BucketMemory], step: int) -> None:
        """Start the exchange of a step, for the gradient memory of each logical worker of this process."""
        if self._under_way or self._error:
            raise LoopError("The last backward was interrupted during its exchange. Resume the run from a checkpoint.")
        self.status.begin(step)
        self._under_way = True
        self.memory = memory
        count = len(self.timetable.buckets)
        self.marks: list[Any] = [None] * count
        self.arrived = [threading.Event() for _ in range(count)]
        self.through: list[Any] = [None] * count
        self.fine = [True] * count
        """Whether a bucket's mean is finite, if that must be known before it is used."""
        self.issued = threading.Event()
        self.spans = Spans()
        self._events.put(lambda: self._begin(step))

    def ready(self, bucket: int) -> None:
        """The gradients of this bucket are in place, for all logical workers of this process."""
        if self.stream is not None:
            self.marks[bucket] = torch.cuda.current_stream(self.device).record_event()
        self._events.put(lambda: self._opened(bucket))

    def wait(self, bucket: int) -> bool:
        """Wait until a bucket's mean is in place. Returns whether it was pending."""
        late = not self.arrived[bucket].is_set()
        self.arrived[bucket].wait()
        if self._error is not None:
            raise self._error
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self.through[bucket])
        return late

    def finish(self) -> None:
        """Wait until every mean is in place."""
        for bucket in range(len(self.arrived)):
            self.wait(bucket)
        self._under_way = False
        self.status.judge(self._telling.heard())

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast process 0's values. Collectives of the library are queued behind the exchange of this step."""
        if tensors and self._under_way and self.transport.mesh is None:
            self.issued.wait()
        self.transport.spread(tensors)

    # --- in the engine's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # lazy parameters must not wait for this thread
            while True:
                act = self._events.get()
                try:
                    if self._error is None:
                        with self._on_stream():
                            act()
                            self._issue()
                except BaseException as error:
                    self._error = error
                    for event in (*self.arrived, self.issued):
                        event.set()

    def _begin(self, step: int) -> None:
        self._issue_order = IssueOrder(self.timetable)
        self._exchanges = [BucketExchange(self, bucket, step) for bucket in range(len(self.timetable.buckets))]
        self._closed = len(self._exchanges)

    def _opened(self, bucket: int) -> None:
        if self.stream is not None:
            self.stream.wait_event(self.marks[bucket])
        self._exchanges[bucket].start()
        self._issue_order.opened(bucket)
        self._closed -= 1
        if self._closed == 0:
            self._telling = self.transport.tell_later(self.status.message)

    def _issue(self) -> None:
        """Issue every slot that is allowed now."""
        while (slot := self._issue_order.next()) is not None:
            self._exchanges[slot.bucket].issue(slot)
        if self._issue_order.empty:
            self.issued.set()

    def part_done(self, slot: Slot) -> None:
        """A part is complete. After a round's last part the exchange continues; after the last round it is complete."""
        if self._issue_order.done(slot):
            self._exchanges[slot.bucket].go_on()
            if self._issue_order.over(slot.bucket):
                self._look_at(slot.bucket)
                if self.stream is not None:
                    self.through[slot.bucket] = self.stream.record_event()
                self.arrived[slot.bucket].set()

    def _look_at(self, bucket: int) -> None:
        """Check an arrived mean. A non-finite one is not used, and is removed from the compressor's state."""
        mean = self.memory[-1].buckets[bucket]
        assert mean is not None
        self.fine[bucket] = self.status.check_means(self.memory[-1].members[bucket], mean)
        if self.fine[bucket] is False:
            kept = [state.get(spec.name, {}) for state in self.states for spec in self.timetable.buckets[bucket]]
            for tensor in (tensor for memory in kept for tensor in memory.values()):
                tensor.nan_to_num_(0.0, 0.0, 0.0)

    def again(self, act: Callable[[], None]) -> None:
        """Run `act` in the engine's thread; called from any thread."""
        self._events.put(act)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()


class BucketExchange:
    """The exchange of one bucket: one flow for each logical worker of this process, and their present collective."""

    def __init__(self, engine: Engine, bucket: int, step: int) -> None:
        self.engine, self.bucket, self.step = engine, bucket, step
        self.ops: list[Any] = []
        self.results: list[Any] = []

    def start(self) -> None:
        """The gradients are ready: run up to the first collective."""
        engine, layout = self.engine, self.engine.transport.layout
        begun = engine.clock.stamp()
        self.flows = []
        for rank, memory, state in zip(layout.carried(), engine.memory, engine.states, strict=True):
            memory.fill(self.bucket)
            mine = memory.handed(self.bucket)
            members = memory.members[self.bucket]
            engine.status.check_gradients(rank, members, mine, memory.looked_at.pop(members[0], None))
            ctx = Context(
                step=self.step,
                rank=rank,
                workers=layout.workers,
                seed=engine.seed,
                momentum=engine.momentum,
                scratch_memory=engine.scratch_memory,
            )
            self.flows.append(engine.compression.exchange(mine.real(), state, ctx))
        self._resume([None] * len(self.flows))
        engine.spans.encode.append((begun, engine.clock.stamp()))

    def issue(self, slot: Slot) -> None:
        """Issue one part of the present collective."""
        if not self.results:
            self.results = [None] * slot.parts
        wire = self.engine.transport.perform(cut(self.ops, slot.part, slot.parts), self.bucket << 20 | slot.part)
        self._advance(slot, wire, self.engine.clock.stamp())

    def _advance(self, slot: Slot, wire: Wire, issued: Stamp) -> None:
        engine = self.engine
        try:
            under_way = next(wire)
            while under_way.at_once:
                under_way.wait()
                under_way = next(wire)
        except StopIteration as stop:
            self.results[slot.part] = stop.value
            engine.spans.wire.append((self.bucket, issued, engine.clock.stamp()))
            engine.part_done(slot)
        else:
            under_way.then(lambda: engine.again(lambda: self._back(under_way, slot, wire, issued)))

    def _back(self, under_way: Works, slot: Slot, wire: Wire, issued: Stamp) -> None:
        under_way.wait()
        self._advance(slot, wire, issued)

    def go_on(self) -> None:
        """All parts of a collective are complete: resume the flows."""
        begun = self.engine.clock.stamp()
        self._resume(joined(self.ops, self.results))
        self.engine.spans.decode.append((begun, self.engine.clock.stamp()))

    def _resume(self, results: list[Any]) -> None:
        self.ops, self.results = [], []
        for flow, state, result in zip(self.flows, self.engine.states, results, strict=True):
            try:
                self.ops.append(flow.send(result))
            except StopIteration as stop:
                state.update(stop.value)
