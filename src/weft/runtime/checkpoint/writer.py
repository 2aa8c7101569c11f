"""Writes checkpoints beside the training: each process copies its share, and a thread writes it."""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import JobError, LoopError, UserError
from weft.runtime.checkpoint.state import Parts, common_state, worker_states
from weft.runtime.loop.data_position import Epoch
from weft.store.checkpoint import Manifest, Policy, aside, contribute, kind_of, prune, publish, withdraw
from weft.store.plain import Tree, plain
from weft.threads import start_serial_thread
from weft.transport.layout import Layout

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Share:
    """One process's part of a checkpoint."""

    files: dict[str, dict[str, Tensor]]
    own: dict[str, Tree]
    """The state of its workers."""
    common: dict[str, Tree]
    """The state that is equal in all processes; process 0 writes it."""
    view: str
    """A hash of the tensors of which this process writes a part."""
    trained: set[str]
    """The names of the parameters."""


class CheckpointWriter:
    """Writes checkpoints of one run parallel to training. The first `writers` processes write the common state."""

    def __init__(
        self, root: Path, layout: Layout, policy: Policy, token: str, timeout_s: float, writers: int | None = None
    ) -> None:
        self.root, self.layout, self.policy, self.token, self.timeout_s = root, layout, policy, token, timeout_s
        self.writers = writers if writers is not None else layout.processes
        self.last = -1
        """The step of the latest save."""
        self._whole: set[int] = set()
        """Checkpoints of this run that this attempt has read or written."""
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def go_on(self, step: int) -> None:
        """The run resumes from its own checkpoint of this step."""
        self.last = step
        self._whole.add(step)

    def model_changed(self) -> None:
        """The model has changed without a step; the checkpoint of the same step is written anew.

        Another token keeps a process that is ahead from writing into the folder of the one before.
        """
        self.last, self.token = -1, f"{self.token}f"

    def save(self, parts: Parts, epoch: Epoch | None, about: dict[str, Any]) -> float:
        """Copy this process's part, and start writing it. Returns the seconds for which the loop was held up."""
        began = time.perf_counter()
        self.wait()
        with parts.mode.merged():
            share = self._share(parts, epoch)
        manifest = Manifest(step=parts.passes.step, files={}, state=share.common, **about)
        self.last = parts.passes.step
        self._thread = start_serial_thread(functools.partial(self._write, share, manifest), "weft-save")
        return time.perf_counter() - began

    def _share(self, parts: Parts, epoch: Epoch | None) -> Share:
        """This process's part, as copies that training does not change."""
        tensors: dict[str, Tensor] = {}
        me, n = self.layout.process, self.writers
        common = common_state(parts, epoch) if me < n else {}
        whole = {key: plain(part, key, tensors) for key, part in common.items()}
        files: dict[str, dict[str, Tensor]] = {}
        for name, tensor in shares(tensors, n)[me].items() if me < n else ():
            kind, _, key = name.partition("/")
            files.setdefault(f"{kind}-{me}-of-{n}.safetensors", {})[key] = self._copied(name, tensor)
        own = {}
        for rank, state in worker_states(parts).items():
            name, mine = f"worker-{rank}", dict[str, Tensor]()
            own[name] = plain(state, name, mine)
            files[f"{name}.safetensors"] = {key.partition("/")[2]: self._copied(key, t) for key, t in mine.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        trained = {name for name, _ in parts.module.named_parameters(remove_duplicate=False)}
        return Share(files=files, own=own, common=whole, view=view_of(tensors) if me < n else "", trained=trained)

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        """A copy that training does not change, in memory that is reused from save to save."""
        kept = self._copies.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[name] = kept
        return kept.copy_(tensor, non_blocking=True)

    def _write(self, share: Share, manifest: Manifest) -> None:
        part, me = aside(self.root, manifest.step, self.token), self.layout.process
        try:
            check_finite(share.files, share.trained, manifest.step)
            contribute(part, me, share.files, share.own, share.view)
            if me == 0:
                publish(self.root, part, self.layout.processes, manifest, self.timeout_s)
                self._whole.add(manifest.step)
                prune(self.root, self.policy, self._whole)
        except BaseException as error:
            self._error = self._told(error)
            withdraw(part, me, share.files, self._error)

    def _told(self, error: BaseException) -> BaseException:
        """An OSError as one sentence."""
        if not isinstance(error, OSError):
            return error
        told = JobError(
            f"the checkpoint of step {self.last} was not written: {error.strerror or error}; free space in "
            f"{self.root}, the previous checkpoint is still good"
        )
        told.__cause__ = error
        return told

    def wait(self) -> None:
        """Wait until the latest save is on disk. If it failed, the run continues and the failure is logged."""
        try:
            self.finish()
        except UserError as error:
            log.warning("%s", error)

    def finish(self) -> None:
        """Wait until the latest save is on disk. Raises the reason if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def shares(tensors: Mapping[str, Tensor], processes: int) -> list[dict[str, Tensor]]:
    """Divide tensors among processes by bytes; the division is the same in every process."""
    rows: list[dict[str, Tensor]] = [{} for _ in range(processes)]
    loads = [0] * processes
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        least = loads.index(min(loads))
        rows[least][name] = tensor
        loads[least] += tensor.nbytes
    return rows


def view_of(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, shapes and dtypes; equal in processes that write parts of the same tensors."""
    rows = sorted(f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items())
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def check_finite(files: Mapping[str, Mapping[str, Tensor]], trained: Collection[str], step: int) -> None:
    """Refuse to save non-finite parameters. Buffers may be non-finite: a mask has minus infinity."""
    for file, tensors in files.items():
        for name in tensors if kind_of(file) == "model" else ():
            if name in trained and not _finite(tensors[name]):
                raise LoopError(
                    f"The checkpoint of step {step} is not written, because {name} is NaN or infinite. Resume from the "
                    "previous one, with a smaller learning rate, clipping, or a compressor with a wider range."
                )


def _finite(tensor: Tensor) -> bool:
    """One pass: a finite sum implies finite terms. A non-finite sum may have overflowed, so each term is checked."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    wide = tensor.float() if tensor.dtype.itemsize < 2 else tensor
    return bool(wide.sum().isfinite()) or bool(wide.isfinite().all())
