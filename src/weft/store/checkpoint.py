"""A checkpoint is a folder that is whole, or is refused.

    checkpoints/step-00000040/
        manifest.json      what the run was, its state as plain values, each file's size and the SHA-256 of its blocks
        manifest.sha256    the manifest's own, as `sha256sum -c` reads it
        model-0-of-4.safetensors …  optimizer-0-of-4.safetensors …  worker-0.safetensors …

Every process writes its share into a folder aside and syncs it; process 0 waits for all, adds the manifest, syncs, and
renames. Whenever a writer is killed, what stands under the final name is the old state or the new one. Whatever byte is
changed, cut off or missing, the manifest tells.

The folders named `step-*` are one history. Where a run starts over, or goes back to an older step, the newer ones are
renamed first, to `.abandoned-*`, or to `.damaged-*` where they are not whole: they are neither counted nor resumed.
They stay on the disk until a run in this folder next goes back.
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
from typing import Any

from torch import Tensor

from weft.errors import JobError, LoopError, UserError
from weft.store.plain import Tree, tensors_in
from weft.store.shards import DamagedError, Seal, check, names, read, write

FORMAT = 1
_MANIFEST_BYTES = 2**28
_NAME = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"[a-z]+-\d+(-of-\d+)?\.safetensors")
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When to save, and what to keep."""

    every: int = 500
    """Steps from one save to the next; 0: never."""
    last: int = 2
    """How many of the latest are kept."""
    milestone: int = 0
    """Beside them, those at multiples of so many steps are kept for good; 0: none."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.milestone < 0:
            raise UserError("steps between checkpoints cannot be negative; 0 stands for never")
        if self.last < 1:
            raise UserError(f"--keep-last is {self.last}, but the latest checkpoint at least must be kept")

    def due(self, step: int) -> bool:
        return self.every > 0 and step > 0 and step % self.every == 0

    def superfluous(self, steps: Iterable[int], whole: Iterable[int]) -> list[int]:
        """Of the checkpoints at these steps, those that need not be kept: only those known to be whole count."""
        latest = sorted(whole)[-self.last :]
        older = [step for step in sorted(steps) if step < latest[0]] if len(latest) == self.last else []
        return [step for step in older if not (self.milestone and step % self.milestone == 0)]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    workers: int
    strategy: str
    seed: int
    job: dict[str, Any]
    """What must be the same where the run goes on: see `runtime/checkpoint/state.py`."""
    state: dict[str, Tree]
    files: dict[str, Seal]

    def text(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


# --- writing --------------------------------------------------------------------------------------------------------


def aside(root: Path, step: int, token: str) -> Path:
    """Where a checkpoint grows until it is whole."""
    return root / f".part-{step:08d}-{token}"


def contribute(
    part: Path, process: int, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Tree], view: str = ""
) -> None:
    """One process's share: files by name, and state that only this process has.

    `view` stands for all tensors of which this process writes a share; it must be the same in every process.
    """
    part.mkdir(parents=True, exist_ok=True)
    seals = {name: asdict(write(part / name, tensors)) for name, tensors in files.items()}
    settle(_piece(part, process), json.dumps({"files": seals, "state": state, "view": view}))


def withdraw(part: Path, process: int, files: Iterable[str], error: BaseException) -> None:
    """A process's share cannot be written: make room again, and let process 0 know the reason."""
    if process == 0:
        shutil.rmtree(part, ignore_errors=True)
        return
    for name in files:
        (part / name).unlink(missing_ok=True)
    word = {"failed": str(error), "loop": isinstance(error, LoopError)}
    with suppress(OSError):
        settle(_piece(part, process), json.dumps(word))


def publish(root: Path, part: Path, processes: int, manifest: Manifest, timeout_s: float) -> Path:
    """When every process has contributed: complete the manifest, make it durable, and give it its name."""
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
    ):  # a process that has contributed here writes to no earlier part, but maybe to a later one
        shutil.rmtree(left, ignore_errors=True)
    return final


def _check_complete(part: Path, manifest: Manifest, views: list[int]) -> None:
    """Refuse to publish a checkpoint that could not be read."""
    missing = absent(part, manifest)
    if missing is None and len(views) < 2:
        return
    other = f"process {views[1]} has other tensors than process 0" if len(views) > 1 else "it would miss a tensor"
    raise LoopError(
        f"the checkpoint of step {manifest.step} is not written: {other}{f' ({missing})' if missing else ''}; let the "
        "state_dict() of what is passed to run.distribute() have the same tensors, by name and shape, in every "
        "process, or say --save-every 0"
    )


def absent(folder: Path, manifest: Manifest) -> str | None:
    """A tensor that the state refers to and no file holds; None where there is none."""
    there = {f"{kind_of(file)}/{name}" for file in manifest.files for name in names(folder / file)}
    return next((name for name in tensors_in(list(manifest.state.values())) if name not in there), None)


def set_aside(root: Path, after: int) -> list[Path]:
    """Rename the checkpoints that are newer than step `after`, where a run goes on; -1: all.

    Those that an earlier call has renamed are removed, so that never more than one abandoned history is on the disk.
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
    """Remove what need not be kept, by the steps that are known to be whole.

    A folder loses its name first, so that none is ever half there.
    """
    found = {step_of(folder): folder for folder in found_in(root)}
    for step in policy.superfluous(found, whole):
        gone = found[step].rename(root / f".gone-{step:08d}")
        shutil.rmtree(gone, ignore_errors=True)


def recover(root: Path) -> None:
    """A checkpoint whose writer was killed while replacing it gets its name back."""
    for old in root.glob(".old-*"):
        final = root / f"step-{old.name.split('-')[1]}"
        if not final.exists():
            old.rename(final)


def tidy(root: Path) -> None:
    """Recover a checkpoint that was being replaced, and remove the rest of what a killed writer left."""
    recover(root)
    for left in (*root.glob(".old-*"), *root.glob(".part-*"), *root.glob(".gone-*")):
        shutil.rmtree(left, ignore_errors=True)
    for left in root.glob(".meet-*"):
        left.unlink(missing_ok=True)


def settle(path: Path, content: str | bytes) -> None:
    """Write a small file that is there whole, and on the disk, or is what it was before."""
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
    """The checkpoints of a run, the newest first; whether they are whole is another question."""
    folders = [folder for folder in root.glob("step-*") if _NAME.fullmatch(folder.name) and folder.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says of itself, if that is what was written."""
    whole = _bounded(folder / "manifest.json", _MANIFEST_BYTES)
    if _bounded(folder / "manifest.sha256", 128) != _seal_line(whole):
        raise DamagedError(f"{folder}/manifest.json is not what was written: its SHA-256 differs")
    try:
        table = json.loads(whole)
        written = table.pop("format")
        if not isinstance(written, int):
            raise TypeError("its format is not a number")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{folder}/manifest.json cannot be understood: {error}") from None
    if written > FORMAT:
        raise UserError(f"{folder} has format {written}, this Weft reads {FORMAT}; use the newer Weft that wrote it")
    try:
        return _understood(table)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{folder}/manifest.json cannot be understood: {error}") from None


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
    """The manifest, once every file has been found to be what was written, and to hold what the state refers to."""
    manifest = read_manifest(folder)
    for name, seal in manifest.files.items():
        check(folder / name, seal)
    if missing := absent(folder, manifest):
        raise DamagedError(f"{folder} holds no tensor {missing[:80]!r}, to which its manifest refers")
    return manifest


def load(folder: Path, manifest: Manifest, kinds: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of some kinds of files (`model`, `worker-3`), by the names that the state uses."""
    tensors: dict[str, Tensor] = {}
    for name, seal in manifest.files.items():
        if (kind := kind_of(name)) in kinds:
            tensors |= {f"{kind}/{key}": tensor for key, tensor in read(folder / name, seal).items()}
    return tensors


def kind_of(file: str) -> str:
    """What a file holds a part of, `model`, or holds alone, `worker-3`."""
    kind, cut, _ = file.removesuffix(".safetensors").partition("-of-")
    return kind.rpartition("-")[0] if cut else kind


def newest(root: Path) -> tuple[Path, Manifest, list[str]]:
    """The newest whole checkpoint of a run, and what was wrong with newer ones."""
    refused: list[str] = []
    for folder in found_in(root):
        try:
            return folder, verify(folder), refused
        except DamagedError as error:
            refused.append(str(error))
    if refused:
        raise JobError(f"no checkpoint in {root} is whole: {'; '.join(refused)}")
    raise JobError(f"{root.parent} holds no checkpoint; a run saves with --save-every, and when it ends")


def _bounded(path: Path, most: int) -> bytes:
    """A small file, never more of it than `most` bytes."""
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(content) > most:
        raise DamagedError(f"{path} has more than {most} bytes")
    return content
