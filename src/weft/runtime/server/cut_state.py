"""The optimizer's state of a parameter whose ranges are on several servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops import Spec
from weft.topology._shards import Range


def cut_state(state: Mapping[str, Any], part: Range, spec: Spec) -> dict[str, Any]:
    """A range's part of a parameter's state: tensors of its shape are cut, other values are copied."""
    if part.numel == spec.numel:
        return dict(state)
    alike = torch.Size(spec.shape)
    return {
        name: each.reshape(-1)[part.start : part.stop] if isinstance(each, Tensor) and each.shape == alike else each
        for name, each in state.items()
    }


def joined_state(pieces: Sequence[tuple[Range, dict[str, Any]]], spec: Spec) -> dict[str, Any]:
    """The inverse of `cut_state`."""
    ordered = sorted(pieces, key=lambda piece: piece[0].start)
    first_range, first = ordered[0]
    if len(ordered) == 1:
        return first
    return {
        name: torch.cat([known[name] for _, known in ordered]).view(spec.shape)
        if isinstance(each, Tensor) and each.shape == (first_range.numel,)
        else each
        for name, each in first.items()
    }
