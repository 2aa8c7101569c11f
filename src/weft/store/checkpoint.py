"""A checkpoint is a folder that is complete, or is rejected.

    checkpoints/step-00000040/
        manifest.json      the run, its state as plain values, and the size and block hashes (SHA-256) of each file
        manifest.sha256    the hash of the manifest, in the format of `sha256sum -c`
        model-0-of-4.safetensors …  optimizer-0-of-4.safetensors …  worker-0.safetensors …

Every process writes its part into a temporary folder and syncs it. Process 0 waits for all parts, adds the manifest,
syncs, and renames the folder. If a writer is killed at any time, the final name holds the old state or the new one. The
manifest reveals any byte that is changed, cut off or missing.

The folders named `step-*` form one history. When a run starts over or resumes from an older step, newer folders are
first renamed to `.abandoned-*`, or to `.damaged-*` if they are incomplete; they are neither counted nor resumed. They
stay on disk until a run in this folder next resumes from an older step.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import JobError, LoopError, UserError
from weft.store.plain import Tree, tensors_in
from weft.store.shards import DamagedError, Seal, check, names, read, write

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
_MANIFEST_BYTES = 2**28
_NAME = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"[a-z]+-\d+(-of-\d+)?\.safetensors")
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When to save, and which checkpoints to keep."""

    every: int = 500
    """Steps between two saves; 0: never."""
    last: int = 2
    """The number of latest checkpoints that are kept."""
    milestone: int = 0
    """Checkpoints at multiples of this many steps are kept for good; 0: none."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.milestone < 0:
            raise UserError("steps between checkpoints cannot be negative; use 0 for never")
        if self.last < 1:
            raise UserError(f"--keep-last is {self.last}, but must be at least 1 to keep the latest checkpoint")

    def due(self, step: int) -> bool:
        return self.every > 0 and step > 0 and step % self.every == 0

    def superfluous(self, steps: Iterable[int], whole: Iterable[int]) -> list[int]:
        """The checkpoints that may be removed, of those at `steps`. Only checkpoints known to be complete count."""
        latest = sorted(whole)[-self.last :]
        older = [step for step in sorted(steps) if step < latest[0]] if len(latest) == self.last else []
        return [step for step in older if not (self.milestone and step % self.milestone == 0)]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    step: int
    workers: int
    strategy: str
    seed: int
    job: dict[str, Any]
    """Properties that must match when the run resumes: see `runtime/checkpoint/state.py`."""
    state: dict[str, Tree]
    files: dict[str, Seal]

    def text(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


# --- writing --------------------------------------------------------------------------------------------------------


def aside(root: Path, step: int, token: str) -> Path:
    """The temporary folder of a checkpoint until it is complete."""
    return root / f".part-{step:08d}-{token}"


def contribute(
    part: Path, process: int, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Tree], view: str = ""
) -> None:
    """Write one process's part: files by name, and the state that only this process has.

    `view` is a digest of all tensors of which this process writes a part; it must be the same in every process.
    """
    part.mkdir(parents=True, exist_ok=True)
    seals = {name: asdict(write(part / name, tensors)) for name, tensors in files.items()}
    settle(_piece(part, process), json.dumps({"files": seals, "state": state, "view": view}))


def withdraw(part: Path, process: int, files: Iterable[str], error: BaseException) -> None:
    """Remove a part that cannot be written, to free the disk, and report the reason to process 0."""
    if process == 0:
        shutil.rmtree(part, ignore_errors=True)
        return
    for name in files:
        (part / name).unlink(missing_ok=True)
    word = {"failed": str(error), "loop": isinstance(error, LoopError)}
    with suppress(OSError):
        settle(_piece(part, process), json.dumps(word))


def publish(root: Path, part: Path, processes: int, manifest: Manifest, timeout_s: float) -> Path:
    """Once every process has contributed: complete the manifest, sync it, and rename the folder to its final name."""
    files, state = dict(manifest.files), dict(manifest.state)
    views: dict[str, int] = {}
    for process in range(processes):
        piece = _awaited(_piece(part, process), timeout_s)
        files |= {name: Seal(seal["bytes"], tuple(seal["sha256"])) for name, seal in piece["files"].items()}
        state |= piece["state"]
        if piece["view"]:
            views.setdefault(piece["view"], process)
    whole = Manifest(**vars(manifest) | {"files": files, "state": state})
    _check_complete(part, whole, list(views.values()))
    text = whole.text().encode()
    settle(part / "manifest.json", text)
    settle(part / "manifest.sha256", _seal_line(text))
    for piece in part.glob("piece-*"):
        piece.unlink()
    sync(part)
    final = root / f"step-{manifest.step:08d}"
    old = root / f".old-{part.name.removeprefix('.part-')}"
    if final.exists():
        final.rename(old)
    part.rename(final)
    sync(root)
    earlier = [left for left in root.glob(".part-*") if int(left.name.split("-")[1]) < manifest.step]
    for left in (
        old,
        *earlier,
    ):  # a process that has contributed here writes to no earlier part, but possibly to a later one
        shutil.rmtree(left, ignore_errors=True)
    return final


def _check_complete(part: Path, manifest: Manifest, views: list[int]) -> None:
    """Refuse to publish a checkpoint that could not be loaded."""
    missing = absent(part, manifest)
    if missing is None and len(views) < 2:
        return
    other = f"process {views[1]} has other tensors than process 0" if len(views) > 1 else "a tensor is missing"
    raise LoopError(
        f"the checkpoint of step {manifest.step} is not written: {other}{f' ({missing})' if missing else ''}; make the "
        "state_dict() of everything passed to run.distribute() have the same tensors, by name and shape, in every "
        "process, or turn checkpoints off with --save-every 0"
    )


def absent(folder: Path, manifest: Manifest) -> str | None:
    """The name of a tensor that the state refers to and no file holds; None if there is none."""
    there = {f"{kind_of(file)}/{name}" for file in manifest.files for name in names(folder / file)}
    return next((name for name in tensors_in(list(manifest.state.values())) if name not in there), None)


def set_aside(root: Path, after: int) -> list[Path]:
    """Rename the checkpoints that are newer than step `after`, where a run resumes; -1: all.

    Folders that an earlier call renamed are removed, so that at most one abandoned history is on disk.
    """
    newer = [folder for folder in found_in(root) if step_of(folder) > after]
    if newer:
        for left in (*root.glob(".abandoned-*"), *root.glob(".damaged-*")):
            shutil.rmtree(left)
    renamed = [folder.rename(root / f".{_verdict(folder)}-{step_of(folder):08d}") for folder in newer]
    sync(root)
    return renamed


def _verdict(folder: Path) -> str:
    try:
        verify(folder)
    except UserError:
        return "damaged"
    return "abandoned"


def prune(root: Path, policy: Policy, whole: Iterable[int]) -> None:
    """Remove checkpoints that need not be kept, given the steps known to be complete.

    A folder is renamed before it is removed, so that no `step-*` folder is ever incomplete.
    """
    found = {step_of(folder): folder for folder in found_in(root)}
    for step in policy.superfluous(found, whole):
        gone = found[step].rename(root / f".gone-{step:08d}")
        shutil.rmtree(gone, ignore_errors=True)


def recover(root: Path) -> None:
    """Restore the name of a checkpoint whose writer was killed while replacing it."""
    for old in root.glob(".old-*"):
        final = root / f"step-{old.name.split('-')[1]}"
        if not final.exists():
            old.rename(final)


def tidy(root: Path) -> None:
    """Recover a checkpoint that was being replaced, and remove everything else that a killed writer left."""
    recover(root)
    for left in (*root.glob(".old-*"), *root.glob(".part-*"), *root.glob(".gone-*")):
        shutil.rmtree(left, ignore_errors=True)
    for left in root.glob(".meet-*"):
        left.unlink(missing_ok=True)


def settle(path: Path, content: str | bytes) -> None:
    """Write a small file atomically and durably: after a crash it has its new content or its old one."""
    scratch = path.with_suffix(".tmp")
    try:
        with scratch.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    scratch.rename(path)


def _piece(part: Path, process: int) -> Path:
    return part / f"piece-{process}.json"


def _awaited(piece: Path, timeout_s: float) -> Any:
    until = time.monotonic() + timeout_s
    while not piece.exists():
        if time.monotonic() > until:
            process = piece.stem.split("-")[1]
            raise JobError(
                f"process {process} did not write its part of a checkpoint to {piece.parent} within {timeout_s:.0f} s; "
                "all processes must reach the run folder: give one on a shared disk with --out"
            )
        time.sleep(_POLL_S)
    word = json.loads(piece.read_text(encoding="utf-8"))
    if "failed" in word:
        raise (LoopError if word["loop"] else JobError)(word["failed"])
    return word


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seal_line(manifest: bytes) -> bytes:
    return f"{hashlib.sha256(manifest).hexdigest()}  manifest.json\n".encode()


# --- reading --------------------------------------------------------------------------------------------------------


def found_in(root: Path) -> list[Path]:
    """The checkpoints of a run, newest first; they may be incomplete."""
    folders = [folder for folder in root.glob("step-*") if _NAME.fullmatch(folder.name) and folder.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest of a checkpoint."""
    whole = _bounded(folder / "manifest.json", _MANIFEST_BYTES)
    if _bounded(folder / "manifest.sha256", 128) != _seal_line(whole):
        raise DamagedError(f"{folder}/manifest.json is damaged: its SHA-256 differs")
    try:
        table = json.loads(whole)
        written = table.pop("format")
        if not isinstance(written, int):
            raise TypeError("its format is not a number")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{folder}/manifest.json cannot be parsed: {error}") from None
    if written > FORMAT:
        raise UserError(f"{folder} has format {written}, this Weft reads {FORMAT}; use the newer Weft that wrote it")
    try:
        return _understood(table)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{folder}/manifest.json cannot be parsed: {error}") from None


def _understood(table: dict[str, Any]) -> Manifest:
    kinds = {"step": int, "workers": int, "strategy": str, "seed": int, "job": dict, "state": dict, "files": dict}
    for key, kind in kinds.items():
        if not isinstance(table[key], kind) or isinstance(table[key], bool):
            raise TypeError(f"{key} is a {type(table[key]).__name__}")
    if table["step"] < 0 or not 1 <= table["workers"] <= 2**20:
        raise ValueError(f"step {table['step']} of {table['workers']} workers")
    files = {}
    for name, seal in table["files"].items():
        if not _FILE.fullmatch(name):
            raise ValueError(f"a file called {name[:80]!r}")
        files[name] = found = Seal(seal["bytes"], tuple(seal["sha256"]))
        right = isinstance(found.bytes, int) and len(found.sha256) == found.blocks()
        if not right or not all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in found.sha256):
            raise ValueError(f"the seal of {name}")
    return Manifest(**{key: table[key] for key in kinds} | {"files": files})


def verify(folder: Path) -> Manifest:
    """The manifest, after checking that every file is undamaged and holds the tensors that the state refers to."""
    manifest = read_manifest(folder)
    for name, seal in manifest.files.items():
        check(folder / name, seal)
    if missing := absent(folder, manifest):
        raise DamagedError(f"{folder} lacks the tensor {missing[:80]!r}, which its manifest refers to")
    return manifest


def load(folder: Path, manifest: Manifest, kinds: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of some kinds of files (`model`, `worker-3`), by the names that the state uses."""
    tensors: dict[str, Tensor] = {}
    for name, seal in manifest.files.items():
        if (kind := kind_of(name)) in kinds:
            tensors |= {f"{kind}/{key}": tensor for key, tensor in read(folder / name, seal).items()}
    return tensors


def kind_of(file: str) -> str:
    """The kind of a file: `model` for a part of the model, `worker-3` for that worker's own state."""
    kind, cut, _ = file.removesuffix(".safetensors").partition("-of-")
    return kind.rpartition("-")[0] if cut else kind


def newest(root: Path) -> tuple[Path, Manifest, list[str]]:
    """The newest complete checkpoint of a run, and the faults of newer ones."""
    refused: list[str] = []
    for folder in found_in(root):
        try:
            return folder, verify(folder), refused
        except DamagedError as error:
            refused.append(str(error))
    if refused:
        raise JobError(f"no checkpoint in {root} is complete: {'; '.join(refused)}")
    raise JobError(f"{root.parent} holds no checkpoint; a run saves with --save-every, and when it ends")


def _bounded(path: Path, most: int) -> bytes:
    """The content of a small file. Raises DamagedError if it has more than `most` bytes."""
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(content) > most:
        raise DamagedError(f"{path} has more than {most} bytes")
    return content
