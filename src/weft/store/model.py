"""The model of a run, without the run: `weft.load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.errors import JobError
from weft.store.checkpoint import load as load_tensors
from weft.store.checkpoint import newest, verify
from weft.store.plain import value


def load(folder: str | Path) -> dict[str, Any]:
    """The model's `state_dict` in the newest complete checkpoint of a run folder, on the CPU.

    `folder` may also be one of the run's checkpoints. Files are verified first. The run may go on meanwhile.
    """
    path = Path(folder)
    if (path / "manifest.json").exists():
        manifest = verify(path)
    elif path.is_dir():
        path, manifest, _ = newest(path / "checkpoints")
    else:
        raise JobError(f"{path} does not exist; give the folder of a run, or one of its checkpoints")
    return dict(value(manifest.state["model"], load_tensors(path, manifest, ["model"])))
