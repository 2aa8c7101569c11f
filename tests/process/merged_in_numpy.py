"""Local optimizers as their papers write them, in NumPy: n workers in one loop, without torch and without Weft.

The model is a chain of linear layers with the mean square error, and every worker steps by SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Model = list[Array]
"""Weight and bias of each layer in turn."""
Group = Sequence[tuple[Array, Array]]
"""The batches of one step, one for each worker; workers beyond them have none."""
Rule = Callable[["Anchor", list[Array], list[float]], list[Array]]
"""Moves an anchor by the workers' copies and weights; returns the new copies."""
SIZES = (3, 2, 2, 1)
"""The widths of the layers: 8, 6 and 3 parameters."""
FRAGMENTS = {1: [[0, 1, 2]], 2: [[0], [1, 2]], 3: [[0], [1], [2]]}
"""The layers of each fragment, by the number of fragments."""
LR, MOMENTUM = 0.05, 0.5


@dataclass
class Anchor:
    """One tensor of the anchor, and the state of its merges."""

    value: Array
    velocity: Array | None = None
    before: Array | None = None


@dataclass
class Worker:
    copy: Model
    velocity: Model | None = None
    samples: list[float] = field(default_factory=list)
    """By fragment: since it was last sent."""


def gradient(model: Model, x: Array, y: Array) -> Model:
    """Backpropagation by hand."""
    inputs = [x]
    for weight, bias in zip(model[::2], model[1::2], strict=True):
        inputs.append(inputs[-1] @ weight.T + bias)
    error = 2 * (inputs[-1] - y) / y.size
    grads: Model = []
    for at in reversed(range(len(model) // 2)):
        grads[:0] = [error.T @ inputs[at], error.sum(0)]
        error = error @ model[2 * at]
    return grads


def mean(rows: list[Array], weights: list[float]) -> Array:
    return sum((w * row for w, row in zip(weights, rows, strict=True)), np.zeros_like(rows[0]))


# --- the rules --------------------------------------------------------------------------------------------------------


def average() -> Rule:
    def merge(anchor: Anchor, copies: list[Array], weights: list[float]) -> list[Array]:
        anchor.value = mean(copies, weights)
        return [anchor.value.copy() for _ in copies]

    return merge


def block_momentum(momentum: float, lr: float) -> Rule:
    """Chen & Huo 2016."""

    def merge(anchor: Anchor, copies: list[Array], weights: list[float]) -> list[Array]:
        change = mean(copies, weights) - anchor.value
        before = anchor.velocity if anchor.velocity is not None else np.zeros_like(change)
        anchor.velocity = momentum * before + lr * change
        anchor.value = anchor.value + anchor.velocity
        return [anchor.value.copy() for _ in copies]

    return merge


def outer(lr: float, momentum: float, nesterov: bool, mix: float = 0.0) -> Rule:
    """Douillard et al. 2023; with `mix` as in its streaming variant."""

    def merge(anchor: Anchor, sent: list[Array], weights: list[float]) -> list[Array]:
        d = anchor.value - mean(sent, weights)
        anchor.velocity = d if anchor.velocity is None else momentum * anchor.velocity + d
        anchor.value = anchor.value - lr * (d + momentum * anchor.velocity if nesterov else anchor.velocity)
        return [anchor.value.copy() for _ in sent]

    return merge


def sma(alpha: float, momentum: float) -> Rule:
    """Koliousis et al. 2019; weights are those of n times as many samples."""

    def merge(anchor: Anchor, copies: list[Array], weights: list[float]) -> list[Array]:
        n = len(copies)
        rate = alpha or 1 / n
        corrections = [rate * (copy - anchor.value) for copy in copies]
        inertia = momentum * (anchor.value - anchor.before) if anchor.before is not None else 0.0
        anchor.before = anchor.value
        anchor.value = anchor.value + n * mean(corrections, weights) + inertia
        return [copy - c for copy, c in zip(copies, corrections, strict=True)]

    return merge


# --- the loop ---------------------------------------------------------------------------------------------------------


@dataclass
class Simulated:
    """What a run leaves: by step, the anchor and every worker's copy before that step, flat; the model in the end."""

    anchors: list[list[float]]
    copies: list[list[list[float]]]
    final: list[float]
    consensus: dict[int, float]
    """By the step after which a result is used: the copies' distance from their mean, relative to the anchor's norm."""


def simulate(
    start: Model,
    groups: Sequence[Group],
    workers: int,
    rule: Rule,
    merges_at: Callable[[int], bool],
    *,
    fragments: int = 1,
    every: int = 1,
    delay: int = 0,
    mix: float = 0.0,
) -> Simulated:
    """Train on `groups`; steps count from 1.

    One fragment is merged after the steps for which `merges_at` says so. Of several, fragment k is sent after each step
    that is (k + 1) every / fragments, rounded down, in its period of `every` steps.
    """
    anchors = [Anchor(tensor.copy()) for tensor in start]
    team = [Worker([tensor.copy() for tensor in start], None, [0.0] * fragments) for _ in range(workers)]
    inside = [[tensor for layer in layers for tensor in (2 * layer, 2 * layer + 1)] for layers in FRAGMENTS[fragments]]
    pending: list[tuple[int, int, list[Model], list[float]]] = []
    sent_at = [0] * fragments
    found = Simulated([], [], [], {})

    def send(k: int, due: int) -> None:
        counts = [worker.samples[k] for worker in team]
        for worker in team:
            worker.samples[k] = 0.0
        weights = [count / sum(counts) for count in counts]
        whole = [np.array(flat([worker.copy[at] for at in inside[k]])) for worker in team]
        apart = mean([np.square(copy - mean(whole, weights)) for copy in whole], weights).sum()
        norm = np.square(flat([anchors[at].value for at in inside[k]])).sum()
        found.consensus[due] = float(np.sqrt(apart / norm))
        pending.append((due, k, [[t.copy() for t in worker.copy] for worker in team], weights))

    def use(step: float) -> None:
        for entry in [entry for entry in pending if entry[0] <= step]:
            pending.remove(entry)
            _, k, sent, weights = entry
            for at in inside[k]:
                new = rule(anchors[at], [model[at] for model in sent], weights)
                for worker, copy in zip(team, new, strict=True):
                    worker.copy[at] = mix * worker.copy[at] + (1 - mix) * copy if mix else copy

    for step, group in enumerate(groups, 1):
        found.anchors.append(flat([anchor.value for anchor in anchors]))
        found.copies.append([flat(worker.copy) for worker in team])
        for rank, worker in enumerate(team):
            if rank >= len(group):
                continue  # without a batch there is no step
            x, y = group[rank]
            grads = gradient(worker.copy, x, y)
            old = worker.velocity
            worker.velocity = grads if old is None else [MOMENTUM * v + g for v, g in zip(old, grads, strict=True)]
            worker.copy = [p - LR * v for p, v in zip(worker.copy, worker.velocity, strict=True)]
            worker.samples = [count + len(x) for count in worker.samples]
        use(step)
        for k in range(fragments):
            turn = (k + 1) * every // fragments % every
            if merges_at(step) if fragments == 1 else step % every == turn:
                send(k, step + delay)
                sent_at[k] = step
        use(step)
    use(float("inf"))
    for k in range(fragments):
        if sent_at[k] < len(groups):
            send(k, 0)
            use(0)
    found.final = flat([anchor.value for anchor in anchors])
    return found


def flat(model: Any) -> list[float]:
    return [float(value) for tensor in model for value in np.asarray(tensor).ravel()]
