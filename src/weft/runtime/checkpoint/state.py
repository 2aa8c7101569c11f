"""The complete state of a run, saved between steps and restored, so that a resumed run is the same run.

    common      model, optimizer, followers (schedulers, a scaler, averages), the data position, the order of buckets
                and the calibration: equal in every process, so each writes a part of the tensors
    per worker  random numbers, the compressor's state, and what followers of a process have counted: written by the
                process that carries the worker

A save copies this process's part and returns; a thread writes it (`store/checkpoint`). A resumed loop starts from its
beginning, so state is restored twice: in `distribute`, and at the batch after the saved step, to undo everything that
the loop has changed up to there.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.errors import LoopError, UserError
from weft.ops import Spec
from weft.optimization import ModelMerging
from weft.runtime.checkpoint.follower_states import follower_state, own_states, states_of
from weft.runtime.loop.data_position import DataPosition, Epoch
from weft.runtime.loop.logical_workers import Passes
from weft.runtime.loop.rng import process_rng_state, set_process_rng_state
from weft.runtime.modes import Mode
from weft.store.checkpoint import (
    Manifest,
    load,
    read_manifest,
)
from weft.store.plain import value
from weft.store.shards import DamagedError
from weft.strategy import Strategy, wrapped
from weft.transport.layout import Layout

log = logging.getLogger(__name__)

_CANNOT = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError)


@dataclass(kw_only=True)
class Parts:
    """The components of a run's state."""

    model: nn.Module
    optimizer: Optimizer
    followers: Sequence[Any]
    passes: Passes
    position: DataPosition
    mode: Mode

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
    layout, own = parts.mode.layout, parts.mode.shared_state()
    held = next((n for n, p in parts.module.named_parameters() if p.grad is not None), None)
    return {
        "model": dict(parts.module.state_dict()),
        "buffers": _unlisted(parts.module),
        "optimizer": parts.mode.optimizer_state(),
        "followers": [follower_state(each) for each in parts.stateful],
        "reading": parts.position.state(parts.passes.step),
        "loops": parts.position.loop_states(),
        "epoch": epoch.number if epoch is not None else None,
        "gradient": held,
        "order": list(layout.order) if layout else None,
        "seen": asdict(layout.measured) if layout and layout.measured else None,
        **({"mode": own} if own else {}),
    }


def worker_states(parts: Parts) -> dict[int, dict[str, Any]]:
    """The state of each logical worker of this process."""
    states = parts.mode.compressor_states
    streams, generators = parts.passes.streams(), [each.get_state() for each in parts.generators]
    process = {"process": process_rng_state(), "generators": generators, "epochs": parts.position.draws()}
    counted = own_states(parts.stateful, local=parts.mode.steps_each_pass)
    process |= {"ranks": list(parts.passes.ranks), "followers": counted}
    own = [parts.mode.worker_state(pass_index) for pass_index in range(parts.passes.count)]
    return {
        rank: {"draws": stream, "memory": memory, **process, **({"mode": mode} if mode else {})}
        for rank, stream, memory, mode in zip(parts.passes.ranks, streams, states, own, strict=True)
    }


def _unlisted(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that the model excludes from its state_dict."""
    listed = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in listed}


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


# --- restoring --------------------------------------------------------------------------------------------------------


def open_saved(folder: Path, layout: Layout) -> LoadedCheckpoint:
    """Read the parts of a checkpoint that this process needs."""
    manifest = read_manifest(folder)
    if folder.name.startswith("."):
        raise UserError(f"{folder} was set aside; to resume from it, rename it to step-{manifest.step:08d}")
    heirs = [rank for rank in range(manifest.workers) if rank % layout.workers in layout.carried()]
    if "mode" in manifest.state and manifest.workers != layout.workers:  # whose copies are averaged
        heirs = list(range(manifest.workers))
    heirs = [rank for rank in heirs if f"worker-{rank}" in manifest.state]
    names = [f"worker-{rank}" for rank in heirs]
    tensors = load(folder, manifest, ["model", "buffers", "optimizer", "followers", "mode", *names])
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
        mine = states_of(saved.workers, saved.common["followers"], parts.passes)
        for follower, state in zip(parts.stateful, mine, strict=True):
            follower.load_state_dict(_cloned(state))
        parts.passes.step = saved.manifest.step


def restore_workers(parts: Parts, saved: LoadedCheckpoint, strategy: Strategy) -> None:
    """Restore the state of each logical worker of this process."""
    passes, workers = parts.passes, saved.workers
    with _fitting(saved):
        parts.mode.restore_compressors([_memory(saved, rank, passes.workers, strategy) for rank in passes.ranks])
        passes.set_streams([_cloned(workers[rank]["draws"]) if rank in workers else None for rank in passes.ranks])
        if passes.ranks[0] in workers:
            first = workers[passes.ranks[0]]
            set_process_rng_state(first["process"])
            for generator, state in zip(parts.generators, first["generators"], strict=True):
                generator.set_state(state.clone())
        if "mode" in saved.common:
            parts.mode.restore(_cloned(saved.common["mode"]), _own_states(saved, passes))


def _own_states(saved: LoadedCheckpoint, passes: Passes) -> list[dict[str, Any]]:
    """The state of the mode of each worker of this process: the workers' mean, if there were more or fewer."""
    if saved.manifest.workers == passes.workers:
        return [_cloned(saved.workers[rank]["mode"]) for rank in passes.ranks]
    states = [saved.workers[rank]["mode"] for rank in sorted(saved.workers)]
    return [mean_of(states) for _ in passes.ranks]


def mean_of(states: Sequence[Any]) -> Any:
    """The mean of floating-point tensors in trees of similar form; the first one's other values.

    An optimizer has no state for a parameter that its worker has not used.
    """
    states = [each for each in states if each is not None] or [None]
    first = states[0]
    if isinstance(first, Tensor):
        if not (first.is_floating_point() or first.is_complex()):
            return first.clone()
        wide = torch.complex128 if first.is_complex() else torch.float64
        return torch.stack([each.to(wide) for each in states]).mean(0).to(first.dtype)
    if isinstance(first, dict):
        keys = dict.fromkeys(key for each in states for key in each)
        return {key: mean_of([each[key] for each in states if key in each]) for key in keys}
    if isinstance(first, (list, tuple)):
        return type(first)(mean_of(parts) for parts in zip(*states, strict=True))
    return first


def check_same_optimization(saved: LoadedCheckpoint, strategy: Strategy) -> None:
    """Refuse a checkpoint of local optimizers under another optimization: workers' states would be lost."""
    old, new = Strategy.parse(saved.manifest.strategy).optimization, strategy.optimization
    if not isinstance(old, ModelMerging):
        return
    if type(old) is not type(new) or old.num_fragments != new.num_fragments:
        raise UserError(
            f"{saved.folder} was saved under {old}, with an optimizer for each worker, and cannot be resumed under "
            f"{new}; resume with {old}, or start a new run from the merged model, weft.load({str(saved.folder)!r})"
        )


def restore_position(position: DataPosition, saved: LoadedCheckpoint, passes: Passes) -> None:
    """Restore the data position; the loop will reach it again."""
    with _fitting(saved):
        first = saved.workers.get(passes.ranks[0], {})
        position.load(saved.common["reading"], _cloned(first.get("epochs", {})), saved.common.get("loops", []))
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
    heir = [_renamed(saved.workers[r]["memory"]) for r in sorted(saved.workers) if r % count == rank]
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


def _renamed(memory: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """The residual has been stored as `owed` before."""
    return {
        name: {"residual" if key == "owed" else key: kept for key, kept in own.items()} for name, own in memory.items()
    }


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
    if saved.manifest.workers != workers and isinstance(old.optimization, ModelMerging):
        said.append("the local models and optimizers are replaced by their averages")
    elif isinstance(strategy.optimization, ModelMerging) and not isinstance(old.optimization, ModelMerging):
        said.append(f"every worker starts {strategy.optimization} from the saved model and optimizer")
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
