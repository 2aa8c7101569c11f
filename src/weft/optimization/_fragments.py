"""Fragments of a model: runs of neighbouring layers of about equal size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from weft.errors import UserError
from weft.ops import Spec


def fragments(specs: Sequence[Spec], count: int) -> list[list[int]]:
    """The indices of each fragment's parameters, in the model's order.

    A layer is a module with parameters of its own, and is never divided. Cuts are as near as possible to equal bytes.
    """
    by_layer = itertools.groupby(range(len(specs)), key=lambda i: specs[i].name.rpartition(".")[0])
    layers = [list(indices) for _, indices in by_layer]
    if count > len(layers):
        raise UserError(f"the model has {len(layers)} layers, and cannot be merged in {count} fragments; use fewer")
    ends = list(itertools.accumulate(sum(specs[i].nbytes for i in layer) for layer in layers))
    cuts = [0]
    for number in range(1, count):
        ideal = ends[-1] * number / count
        possible = range(cuts[-1] + 1, len(layers) - (count - number) + 1)
        cuts.append(min(possible, key=lambda at: abs(ends[at - 1] - ideal)))
    cuts.append(len(layers))
    return [[i for layer in layers[a:b] for i in layer] for a, b in itertools.pairwise(cuts)]
