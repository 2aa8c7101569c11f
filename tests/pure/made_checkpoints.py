"""Small checkpoints for the tests of the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from weft.store import checkpoint
from weft.store.checkpoint import Manifest
from weft.store.plain import plain

# --- whole or refused -------------------------------------------------------------------------------------------------


def make(root: Path, step: int, count: int = 100, name: str = "j") -> Path:
    """A checkpoint by two processes."""
    part = checkpoint.aside(root, step, "token")
    rng = torch.Generator().manual_seed(step)
    tensors: dict[str, torch.Tensor] = {}
    model = plain({"a": torch.randn(count, generator=rng), "b": torch.randn(9, generator=rng)}, "model", tensors)
    for process, key in enumerate(("a", "b")):
        files = {f"model-{process}-of-2.safetensors": {key: tensors[f"model/{key}"]}}
        own = dict[str, torch.Tensor]()
        tree = plain({"draws": torch.get_rng_state()[:100]}, f"worker-{process}", own)
        files[f"worker-{process}.safetensors"] = {path.partition("/")[2]: each for path, each in own.items()}
        checkpoint.contribute(part, process, files, {f"worker-{process}": tree})
    about: dict[str, Any] = {"workers": 2, "strategy": "bsp / direct", "seed": 0, "job": {"name": name}}
    return checkpoint.publish(root, part, 2, Manifest(step=step, files={}, state={"model": model}, **about), 1.0)


def resealed(folder: Path, table: Any) -> None:
    """A manifest that says something else, and vouches for it."""
    whole = table if isinstance(table, bytes) else json.dumps(table).encode()
    (folder / "manifest.json").write_bytes(whole)
    (folder / "manifest.sha256").write_bytes(checkpoint._seal_line(whole))
