"""The record of a run: one event per step in the run folder, at almost no cost.

    strategy.toml  environment.json  model.json  events-<process>.jsonl  report.json
    checkpoints/ (see store/checkpoint)  resumed.jsonl (if the run was resumed)
    seen.json (if the schedule needs calibration)  trace-<process>.json (with --trace)

The phases of an event, in seconds: forward; backward (including the loss); encode and decode (compression and sums, in
the engine's thread); exposed (communication while the loop waits for it); hidden (communication while the loop
computes); optimizer.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from weft.environment import LocalLauncher
from weft.lazy import torch
from weft.runtime.record.clock import Clock
from weft.runtime.record.files import hold, open_lines, writing
from weft.runtime.record.trace import length, overlap, perfetto, union

log = logging.getLogger(__name__)

Values = dict[str, list[tuple[float, Any]]]
"""Logged values of a step: for each name, the share and the value of each logical worker of this process."""

_FLUSH_S = 1.0
_TRACED_STEPS = 30


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


def progress_pipe() -> Callable[[dict[str, Any]], None] | None:
    """A function that reports progress to the launcher; None without a launcher."""
    number = LocalLauncher.from_env().progress_fd
    if number is None:
        return None

    def tell(event: dict[str, Any]) -> None:
        try:
            os.write(number, (json.dumps(event) + "\n").encode())
        except OSError:
            pass  # the launcher is gone, and this process is about to be killed

    return tell


# --- spans ----------------------------------------------------------------------------------------------------------


def _resolved(clock: Clock, span: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*span[:-2], clock.seconds(span[-2]), clock.seconds(span[-1]))


def _mean(entries: list[tuple[float, Any]]) -> Any:
    """The mean of the logical workers' values, weighted by their shares; None if none of them had a sample."""
    entries = [(share, v.item() if isinstance(v, torch.Tensor) else v) for share, v in entries]
    if not all(isinstance(value, (int, float)) for _, value in entries):
        return str(entries[-1][1])
    total = sum(share for share, _ in entries)
    if len(entries) == 1:
        return entries[0][1] if total else None
    return sum(share * value for share, value in entries) / total if total else None
