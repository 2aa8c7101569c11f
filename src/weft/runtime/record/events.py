"""The record of a run: one event per step in the run folder, at almost no cost.

    strategy.toml  environment.json  model.json  events-<process>.jsonl  report.json
    checkpoints/ (see store/checkpoint)  resumed.jsonl (if the run was resumed)
    seen.json (if the schedule needs calibration)  trace-<process>.json (with --trace)

The phases of an event, in seconds: forward; backward (including the loss); encode and decode (compression and sums, in
the engine's thread); exposed (communication while the loop waits for it); hidden (communication while the loop
computes); optimizer.
"""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, Protocol

from torch import Tensor

from weft.errors import JobError, UserError
from weft.runtime.record.clock import Clock, Spans, Stamp
from weft.store.checkpoint import settle, sync

log = logging.getLogger(__name__)

Values = dict[str, list[tuple[float, Any]]]
"""Logged values of a step: for each name, the share and the value of each logical worker of this process."""

_FLUSH_S = 1.0
_TRACED_STEPS = 30


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


class Recorder:
    """Writes the events of one process, in batches, and reports progress from time to time.

    Process 0 locks the folder meanwhile.
    """

    def __init__(
        self,
        folder: Path | None,
        process: int,
        clock: Clock,
        tell: Callable[[dict[str, Any]], None] | None,
        trace: bool,
    ) -> None:
        self.folder, self.process, self.clock, self.tell = folder, process, clock, tell
        self.pending: list[tuple[int, dict[str, Any], float, int, Values]] = []
        self.trace: list[tuple[int, dict[str, Any]]] | None = [] if trace else None
        self.about: dict[str, Any] = {}
        """Additional fields of progress reports."""
        self.marks: set[int] = set()
        """Steps whose end is reported at once, because counters are read then."""
        self.attempt = 0
        """The number of times the run was resumed; a repeated step counts as in its last attempt."""
        self._flushed = time.monotonic()
        self._file: IO[str] | None = None
        self._hold: IO[bytes] | None = None
        self.again = False
        """Whether the folder holds events of an earlier run, or of an earlier attempt of this one."""
        if folder is not None:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                self._hold = hold(folder, "run") if process == 0 else None
                self._file = open_lines(folder / f"events-{process}.jsonl")
                self.again = self._file.seek(0, os.SEEK_END) > 0

    def add(self, step: int, stamps: dict[str, Any], sent: float, samples: int, values: Values) -> None:
        if step in self.marks and self.tell:
            self.tell({"mark": step})
        if len(self.pending) > 1 and time.monotonic() - self._flushed > _FLUSH_S:
            self.flush()
        self.pending.append((step, stamps, sent, samples, values))

    def flush(self) -> None:
        """Convert timestamps and values, and write them."""
        events = [self._event(*entry) for entry in self.pending]
        self.pending = []
        self._flushed = time.monotonic()
        if self._file is not None and self.folder is not None:
            with writing(self.folder):
                self._file.write("".join(json.dumps(event) + "\n" for event in events))
                self._file.flush()
        if self.tell and events:
            self.tell(events[-1] | self.about)

    def close(self) -> None:
        self.flush()
        if self._file is not None and self.folder is not None:
            with writing(self.folder):
                self._file.close()
                if self.trace:
                    name = self.folder / f"trace-{self.process}.json"
                    name.write_text(json.dumps(perfetto(self.trace, self.process)), encoding="utf-8")
        if self._hold is not None:
            self._hold.close()

    def _event(self, step: int, stamps: dict[str, Any], sent: float, samples: int, values: Values) -> dict[str, Any]:
        at = {name: [_resolved(self.clock, span) for span in spans] for name, spans in stamps.items()}
        if self.trace is not None and len(self.trace) < _TRACED_STEPS:
            self.trace.append((step, at))
        wire = union((start, end) for _, start, end in at["wire"])
        exposed = overlap(wire, union(at["waited"]))
        event: dict[str, Any] = {"step": step, "time_s": at["step"][0][1], "step_s": length(at["step"])}
        event |= {f"{name}_s": length(at[name]) for name in ("forward", "backward", "encode")}
        event |= {"exposed_s": exposed, "hidden_s": length(wire) - exposed}
        event |= {"decode_s": length(at["decode"]), "optimizer_s": length(at["optimizer"]) + length(at["update"])}
        event = {key: round(value, 7) if isinstance(value, float) else value for key, value in event.items()}
        event |= {"wire_bytes": round(sent), "samples": samples}
        event |= {"attempt": self.attempt} if self.attempt else {}
        return event | {key: _mean(entries) for key, entries in values.items()}


class writing:
    """Turns an OSError into one sentence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise JobError(
                f"the run folder {self.path} cannot be written: {error.strerror}; free space or give another with --out"
            ) from error


def hold(folder: Path, what: str) -> IO[bytes]:
    """Lock a folder for this process, until the returned file is closed. Raises UserError if another process has it.

    It is a POSIX lock, which a forked process does not inherit: data-loader processes of a killed run do not keep it.
    """
    file = (folder / f".{what}.lock").open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise UserError(f"{folder} is in use by a running run; wait for its end, or stop it first") from None
    except OSError as error:
        log.warning("%s cannot be locked: %s; do not start a second run there", folder, error.strerror)
    return file


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically; if that fails, the old content stays."""
    with writing(path.parent):
        settle(path, text)
        sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a small, human-readable JSON file."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def open_lines(path: Path) -> IO[str]:
    """Open a file of lines for appending; a truncated last line is terminated first."""
    file = path.open("a+b")
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8")


def append_line(path: Path, value: Any) -> None:
    with writing(path.parent), open_lines(path) as file:
        file.write(json.dumps(value) + "\n")


def lines_in(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def progress_pipe() -> Callable[[dict[str, Any]], None] | None:
    """A function that reports progress to the launcher; None without a launcher."""
    number = os.environ.get("WEFT_PROGRESS_FD")
    if not number:
        return None

    def tell(event: dict[str, Any]) -> None:
        try:
            os.write(int(number), (json.dumps(event) + "\n").encode())
        except OSError:
            pass  # the launcher is gone, and this process is about to be killed

    return tell


# --- spans ----------------------------------------------------------------------------------------------------------

Span = tuple[float, float]


def _resolved(clock: Clock, span: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*span[:-2], clock.seconds(span[-2]), clock.seconds(span[-1]))


def _mean(entries: list[tuple[float, Any]]) -> Any:
    """The mean of the logical workers' values, weighted by their shares; None if none of them had a sample."""
    entries = [(share, v.item() if isinstance(v, Tensor) else v) for share, v in entries]
    if not all(isinstance(value, (int, float)) for _, value in entries):
        return str(entries[-1][1])
    total = sum(share for share, _ in entries)
    if len(entries) == 1:
        return entries[0][1] if total else None
    return sum(share * value for share, value in entries) / total if total else None


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time in intervals that do not overlap."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap(one: list[Span], other: list[Span]) -> float:
    """The duration of the intersection of two sets of intervals."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


def length(spans: Iterable[Span]) -> float:
    return float(sum(end - start for start, end in spans))


def perfetto(steps: list[tuple[int, dict[str, Any]]], process: int) -> dict[str, Any]:
    """The traced steps in the format of ui.perfetto.dev and chrome://tracing."""
    rows = {"forward": 0, "backward": 0, "waited": 0, "optimizer": 0, "update": 0, "encode": 1, "decode": 1}
    events: list[dict[str, Any]] = []

    def add(name: str, row: int, start: float, end: float, step: int) -> None:
        events.append(
            {"name": name, "ph": "X", "pid": process, "tid": row, "ts": start * 1e6, "dur": (end - start) * 1e6}
            | {"args": {"step": step}}
        )

    for step, at in steps:
        for name, row in rows.items():
            for start, end in at[name]:
                add("wait" if name == "waited" else name, row, start, end, step)
        for bucket, start, end in at["wire"]:
            add(f"bucket {bucket}", 2 + bucket, start, end, step)
    names = {0: "loop", 1: "engine"} | {2 + b: f"wire: bucket {b}" for _, at in steps for b, *_ in at["wire"]}
    for row, name in names.items():
        events.append({"name": "thread_name", "ph": "M", "pid": process, "tid": row, "args": {"name": name}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
