"""The complete state of a run, saved between steps and restored, so that a resumed run is the same run.

    common      model, optimizer, followers (schedulers, a scaler, averages), the data position, the order of buckets
                and the calibration: equal in every process, so each writes a part of the tensors
    per worker  random numbers and the compressor's state: written by the process that carries the worker

A save copies this process's part and returns; a thread writes it (`store/checkpoint`). A resumed loop starts from its
beginning, so state is restored twice: in `distribute`, and at the batch after the saved step, to undo everything that
the loop has changed up to there.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.errors import JobError, LoopError, UserError
from weft.ops import Spec
from weft.runtime.loop.data_position import DataPosition, Epoch
from weft.runtime.loop.logical_workers import Passes
from weft.runtime.loop.rng import process_rng_state, set_process_rng_state
from weft.runtime.modes.all_reduce import Gradients
from weft.runtime.modes.parameter_server import Served
from weft.store.checkpoint import (
    Manifest,
    Policy,
    aside,
    contribute,
    kind_of,
    load,
    prune,
    publish,
    read_manifest,
    withdraw,
)
from weft.store.plain import Tree, plain, value
from weft.store.shards import DamagedError
from weft.strategy import Strategy, wrapped
from weft.threads import start_serial_thread
from weft.transport.layout import Layout

log = logging.getLogger(__name__)

_WRAPPED = ("step", "update", "unscale_")
_CANNOT = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError)


@dataclass(kw_only=True)
class Parts:
    """The components of a run's state."""

    model: nn.Module
    optimizer: Optimizer
    followers: Sequence[Any]
    passes: Passes
    position: DataPosition
    gradients: Gradients | None = None
    served: Served | None = None

    @property
    def stateful(self) -> list[Any]:
        """Followers with a state that is equal in every process."""
        return [each for each in self.followers if not isinstance(each, torch.Generator)]

    @property
    def generators(self) -> list[torch.Generator]:
        """Random number generators that are the process's own."""
        return [each for each in self.followers if isinstance(each, torch.Generator)]

    @property
    def module(self) -> nn.Module:
        """The model itself, without a compiler's wrapper."""
        inner = getattr(self.model, "_orig_mod", self.model)
        assert isinstance(inner, nn.Module)
        return inner


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


@dataclass(kw_only=True)
class LoadedCheckpoint:
    """The content of a checkpoint, read and validated."""

    folder: Path
    manifest: Manifest
    common: dict[str, Any]
    workers: dict[int, dict[str, Any]]
    """By the rank of the worker when it was saved."""


# --- the state --------------------------------------------------------------------------------------------------------


def common_state(parts: Parts, epoch: Epoch | None) -> dict[str, Any]:
    """The state that is equal in every process."""
    gradients = parts.gradients
    held = next((n for n, p in parts.module.named_parameters() if p.grad is not None), None)
    return {
        "model": dict(parts.module.state_dict()),
        "buffers": _unlisted(parts.module),
        "optimizer": parts.optimizer.state_dict(),
        "followers": [_follower_state(each) for each in parts.stateful],
        "reading": parts.position.state(parts.passes.step),
        "epoch": epoch.number if epoch is not None else None,
        "gradient": held,
        "order": [gradients.names[i] for i in gradients.finished] if gradients else None,
        "seen": asdict(gradients.seen) if gradients and gradients.seen else None,
    }


def worker_states(parts: Parts) -> dict[int, dict[str, Any]]:
    """The state of each logical worker of this process."""
    states = parts.gradients.engine.states if parts.gradients else [{} for _ in parts.passes.ranks]
    if parts.served is not None:
        states = [parts.served.client.state]
    streams, generators = parts.passes.streams(), [each.get_state() for each in parts.generators]
    process = {"process": process_rng_state(), "generators": generators, "epochs": parts.position.draws()}
    return {
        rank: {"draws": stream, "memory": memory, **process}
        for rank, stream, memory in zip(parts.passes.ranks, streams, states, strict=True)
    }


def _unlisted(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that the model excludes from its state_dict."""
    listed = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in listed}


def _follower_state(follower: Any) -> Any:
    if not hasattr(follower, "state_dict"):
        raise UserError(
            f"run.distribute() was given a {type(follower).__name__}, which has no state_dict(), so a checkpoint "
            "cannot hold it; give it one, or omit it, or turn checkpoints off with --save-every 0"
        )
    return {key: each for key, each in follower.state_dict().items() if not (key in _WRAPPED and callable(each))}


def untracked_schedulers(parts: Parts) -> str | None:
    """The class of a scheduler that was not passed to the run, and would be missing; None if there is none."""
    for each in gc.get_objects():
        kind = type(each)
        if issubclass(kind, LRScheduler):
            mine = each.optimizer is parts.optimizer
        elif issubclass(kind, GradScaler):
            mine = each.is_enabled() and each._scale is not None
        else:
            continue
        if mine and not any(each is known for known in _with_inner(parts.followers)):
            return kind.__name__
    return None


def _with_inner(followers: Sequence[Any]) -> list[Any]:
    """Followers and the schedulers inside them."""
    found = list(followers)
    for follower in found:
        found += [each for each in getattr(follower, "_schedulers", ()) if each not in found]
    return found


# --- saving -----------------------------------------------------------------------------------------------------------


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

    def save(self, parts: Parts, epoch: Epoch | None, about: dict[str, Any]) -> float:
        """Copy this process's part, and start writing it. Returns the seconds for which the loop was held up."""
        began = time.perf_counter()
        self.wait()
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


# --- restoring --------------------------------------------------------------------------------------------------------


def open_saved(folder: Path, layout: Layout) -> LoadedCheckpoint:
    """Read the parts of a checkpoint that this process needs."""
    manifest = read_manifest(folder)
    if folder.name.startswith("."):
        raise UserError(f"{folder} was set aside; to resume from it, rename it to step-{manifest.step:08d}")
    heirs = [rank for rank in range(manifest.workers) if rank % layout.workers in layout.carried()]
    heirs = [rank for rank in heirs if f"worker-{rank}" in manifest.state]
    names = [f"worker-{rank}" for rank in heirs]
    tensors = load(folder, manifest, ["model", "buffers", "optimizer", "followers", *names])
    try:
        common = {key: value(tree, tensors) for key, tree in manifest.state.items() if not key.startswith("worker-")}
        workers = {rank: value(manifest.state[name], tensors) for rank, name in zip(heirs, names, strict=True)}
        return LoadedCheckpoint(folder=folder, manifest=manifest, common=common, workers=workers)
    except _CANNOT as error:
        raise DamagedError(f"{folder}/manifest.json cannot be parsed: {error}") from None


def check_same_job(saved: LoadedCheckpoint, specs: Sequence[Spec], optimizer: Optimizer) -> None:
    """Refuse a checkpoint of another model or optimizer."""
    mine = {spec.name: list(spec.shape) for spec in specs}
    with _fitting(saved):
        theirs = {name: list(shape) for name, shape, _ in saved.manifest.job["model"]}
    if mine != theirs:
        name = next(iter([n for n in {**mine, **theirs} if mine.get(n) != theirs.get(n)]))
        has = f"it has {name} with shape {theirs[name]}" if name in theirs else f"it has no {name}"
        raise UserError(
            f"{saved.folder} is a checkpoint of another job: {has}, here {mine.get(name, 'none')}; resume its own job"
        )
    kind = saved.manifest.job.get("optimizer")
    if kind != type(optimizer).__name__:
        raise UserError(
            f"{saved.folder} was made with {kind}, but the job now has {type(optimizer).__name__}; use the same"
        )


def restore(parts: Parts, saved: LoadedCheckpoint) -> None:
    """Restore the state that all processes share."""
    with _fitting(saved):
        common = saved.common
        parts.module.load_state_dict(common["model"])
        for name in {**common["buffers"], **_unlisted(parts.module)}:
            _restore_buffer(parts.module, name, common["buffers"][name])
        parts.optimizer.load_state_dict(_cloned(common["optimizer"]))
        if len(common["followers"]) != len(parts.stateful):
            raise ValueError(
                f"the checkpoint holds the state of {len(common['followers'])} schedulers or scalers, but "
                f"run.distribute() was given {len(parts.stateful)}"
            )
    restore_followers(parts, saved)


def _restore_buffer(model: nn.Module, name: str, kept: Tensor) -> None:
    """Restore a buffer that the state_dict excludes, even if forward creates or grows it."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    there = owner._buffers.get(leaf)
    if there is not None and there.shape == kept.shape and there.dtype == kept.dtype:
        there.copy_(kept)
        return
    device = there.device if there is not None else next(model.parameters()).device
    owner.register_buffer(leaf, kept.clone().to(device), persistent=False)


def restore_followers(parts: Parts, saved: LoadedCheckpoint) -> None:
    """Restore the state of followers."""
    with _fitting(saved):
        for follower, state in zip(parts.stateful, saved.common["followers"], strict=True):
            follower.load_state_dict(_cloned(state))
        parts.passes.step = saved.manifest.step


def restore_workers(parts: Parts, saved: LoadedCheckpoint, strategy: Strategy) -> None:
    """Restore the state of each logical worker of this process."""
    passes, workers = parts.passes, saved.workers
    with _fitting(saved):
        if parts.gradients is not None:
            parts.gradients.buffers.settled()
            engine = parts.gradients.engine
            memory = [_memory(saved, rank, passes.workers, strategy) for rank in passes.ranks]
            engine.states[:] = [
                {name: {key: kept.to(engine.device) for key, kept in own.items()} for name, own in state.items()}
                for state in memory
            ]
        if parts.served is not None:
            parts.served.client.state = _memory(saved, passes.rank, passes.workers, strategy)
        passes.set_streams([_cloned(workers[rank]["draws"]) if rank in workers else None for rank in passes.ranks])
        if passes.ranks[0] in workers:
            first = workers[passes.ranks[0]]
            set_process_rng_state(first["process"])
            for generator, state in zip(parts.generators, first["generators"], strict=True):
                generator.set_state(state.clone())


def restore_position(position: DataPosition, saved: LoadedCheckpoint, passes: Passes) -> None:
    """Restore the data position; the loop will reach it again."""
    with _fitting(saved):
        first = saved.workers.get(passes.ranks[0], {})
        position.load(saved.common["reading"], _cloned(first.get("epochs", {})))
        position.resized = saved.manifest.workers != passes.workers


@contextmanager
def _fitting(saved: LoadedCheckpoint) -> Iterator[None]:
    """Turns any mismatch into one sentence."""
    try:
        yield
    except UserError:
        raise
    except _CANNOT as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{saved.folder} does not fit this job: {reason}; resume the job that made it, unchanged"
        ) from error


def _memory(saved: LoadedCheckpoint, rank: int, count: int, strategy: Strategy) -> dict[str, dict[str, Tensor]]:
    """The state of a worker's compressor: unchanged, or the residual only if the compressor or the layout differs.

    If there are fewer workers now, one worker takes over the residuals of several; their sum is preserved.
    """
    heir = [saved.workers[r]["memory"] for r in sorted(saved.workers) if r % count == rank]
    same = Strategy.parse(saved.manifest.strategy).compression == strategy.compression
    if same and saved.manifest.workers == count:
        return dict(_cloned(heir[0])) if heir else {}  # without lockstep, worker 0 has saved only itself
    merged: dict[str, dict[str, Tensor]] = {}
    for memory in heir if _has_residual(strategy) else ():
        for name, kept in memory.items():
            if "residual" in kept:
                residual = merged.setdefault(name, {"residual": torch.zeros_like(kept["residual"])})["residual"]
                residual += kept["residual"]
    return merged


def _has_residual(strategy: Strategy) -> bool:
    return any(layer.has_residual for layer in wrapped(strategy.compression))


def conversions(saved: LoadedCheckpoint, workers: int, strategy: Strategy) -> list[str]:
    """The differences from the saved run, and their consequences."""
    said = []
    old = Strategy.parse(saved.manifest.strategy)
    if saved.manifest.workers != workers:
        said.append(
            f"{saved.manifest.workers} workers have become {workers}: each remaining sample is still used once, but "
            "the batch of a step has another size, and results are not bit-identical to the run before"
        )
    if old.compression != strategy.compression and any(w["memory"] for w in saved.workers.values()):
        kept = _has_residual(old) and _has_residual(strategy)
        said.append(
            f"{old.compression} has become {strategy.compression}: "
            + ("the residual is kept, other state is lost" if kept else "the residual is lost")
        )
    return said


def expect_clearing(model: nn.Module, saved: LoadedCheckpoint) -> None:
    """A checkpoint holds no gradients. If there were some, the loop must clear them before it adds to them."""
    param = dict(model.named_parameters()).get(saved.common["gradient"] or "")
    if param is None:
        return
    mark = torch.zeros_like(param)
    param.grad = mark

    def check(param: Tensor) -> None:
        handle.remove()
        if param.grad is mark:
            raise LoopError(
                "the loop adds to the gradients of the previous step, which a checkpoint does not hold; let "
                "optimizer.zero_grad() set them to None in every step"
            )

    handle = param.register_post_accumulate_grad_hook(check)


def _cloned(state: Any) -> Any:
    """Tensors in separate memory: the saved ones are needed twice, and torch reads a generator's state from the
    beginning of its storage."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return type(state)({key: _cloned(each) for key, each in state.items()})
    if isinstance(state, (list, tuple)):
        return type(state)(_cloned(each) for each in state)
    return state
