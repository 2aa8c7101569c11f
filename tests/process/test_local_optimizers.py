"""Local optimizers between real processes: they are their papers' formulas, whatever carries them out."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import weft
from tests.process import merged_in_numpy as numpy_
from tests.process.harness import spawn
from tests.process.merged_in_numpy import LR, MOMENTUM, Simulated, flat, simulate
from weft.ops import Spec
from weft.optimization import ModelMerging
from weft.runtime.checks import replicas
from weft.runtime.record.run_folder import events
from weft.schedule.fused import Fused
from weft.strategy import Strategy
from weft.units import Size

WORKERS, STEPS = 4, 11
Batch = tuple[Tensor, Tensor]
Learned = tuple[dict[tuple[int, int], tuple[list[float], list[float]]], list[float], list[str]]
"""By step and rank: the copy and the anchor before that step; the model in the end; hashes of anchors on the way."""

RULES = {
    "average(every=1)": numpy_.average,
    "average(every=3)": numpy_.average,
    "average(every=20)": numpy_.average,
    "post_local(every=4, switch_at=3)": numpy_.average,
    "block_momentum(every=3, momentum=0.5, lr=0.9)": lambda: numpy_.block_momentum(0.5, 0.9),
    "sma(every=1)": lambda: numpy_.sma(0.0, 0.9),
    "sma(every=2, alpha=0.3, momentum=0.5)": lambda: numpy_.sma(0.3, 0.5),
    "outer(every=3)": lambda: numpy_.outer(0.7, 0.9, True),
    "outer(every=2, lr=0.5, momentum=0.5, nesterov=false)": lambda: numpy_.outer(0.5, 0.5, False),
    "outer(every=2, momentum=0.0)": lambda: numpy_.outer(0.7, 0.0, True),
    "streaming(every=4, fragments=2)": lambda: numpy_.outer(0.7, 0.9, True),
    "streaming(every=5, fragments=3, delay=2)": lambda: numpy_.outer(0.7, 0.9, True),
    "streaming(every=4, fragments=3, delay=4, mix=0.25)": lambda: numpy_.outer(0.7, 0.9, True),
    "streaming(every=3, fragments=2, delay=0, nesterov=false)": lambda: numpy_.outer(0.7, 0.9, False),
}
"""Each answer with its formula."""
BRIEFLY = (
    *("average(every=3)", "post_local(every=4, switch_at=3)", "block_momentum(every=3)", "sma(every=2)"),
    *("outer(every=3)", "streaming(every=4, fragments=2)"),
)
"""Every answer once."""


def build() -> nn.Sequential:
    torch.manual_seed(1)
    sizes = numpy_.SIZES
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))).double()


def batches(steps: int = STEPS, uneven: bool = False) -> list[Batch]:
    """Noisy samples of a linear function; if uneven, batches differ in size and the last step lacks two."""
    rng = torch.Generator().manual_seed(3)
    secret = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    found = []
    for at in range(WORKERS * steps - 2 * uneven):
        x = torch.randn(3 + at * 7 % 4 * uneven, 3, generator=rng, dtype=torch.float64)
        found.append((x, x @ secret + 0.1 * torch.randn(len(x), 1, generator=rng, dtype=torch.float64)))
    return found


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def digest(state: Any) -> str:
    values = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in state.values())
    return hashlib.blake2b(values, digest_size=8).hexdigest()


def learn(data: list[Batch], bucket: int = 0, lr: float = LR) -> Learned:
    """SGD with momentum; a look at the copy and the anchor before each step."""
    replicas.HASH_EVERY = 2
    if bucket:
        small = Fused(bucket=Size(bucket), first=Size(bucket), alone=Size(2 * bucket))
        timetable = Fused.timetable
        Fused.timetable = lambda _, specs, rounds, seen=None: timetable(small, specs, rounds, seen)  # type: ignore
    run = weft.init()
    model: Any = build()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    model, optimizer = run.distribute(model, optimizer)
    seen, hashes = {}, []
    for batch in run.shard(data):
        with run.merged():
            anchor = flat(p.detach().numpy() for p in model.parameters())
            hashes.append(digest(model.state_dict()))
        seen[run.step, run.rank] = flat(p.detach().numpy() for p in model.parameters()), anchor
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    hashes.append(digest(model.state_dict()))
    return seen, flat(p.detach().numpy() for p in model.parameters()), hashes


def trained(strategy: str, data: list[Batch], processes: int = WORKERS, bucket: int = 0, lr: float = LR) -> Learned:
    """One run with four workers; what its processes have seen, put together."""
    found = spawn(processes, learn, data, bucket, lr, workers=WORKERS, WEFT_STRATEGY=strategy)
    assert all(final == found[0][1] for _, final, _ in found)
    looks = {tuple(dict.fromkeys(hashes)) for _, _, hashes in found}
    assert len(looks) == 1, "anchors differ between processes"
    return {at: look for seen, _, _ in found for at, look in seen.items()}, found[0][1], list(looks.pop())


def simulated(spelling: str, data: list[Batch], workers: int = WORKERS) -> Simulated:
    answer: Any = Strategy.parse(f"{spelling} / bsp / direct").optimization
    start = [p.detach().numpy() for p in build().parameters()]
    pairs = [(x.numpy(), y.numpy()) for x, y in data]
    groups = [pairs[at : at + workers] for at in range(0, len(pairs), workers)]
    switch = getattr(answer, "switch_at", 0)
    if "streaming" not in spelling:
        merges_at = lambda step: step <= switch or step % answer.every == 0  # noqa: E731
        return simulate(start, groups, workers, RULES[spelling](), merges_at)
    delay = answer.delay if answer.delay >= 0 else max(1, answer.every // answer.fragments)
    how = {"fragments": answer.fragments, "every": answer.every, "delay": delay, "mix": answer.mix}
    return simulate(start, groups, workers, RULES[spelling](), lambda _: False, **how)


def agrees(found: Learned, expected: Simulated, within: float) -> None:
    seen, final, _ = found
    assert set(seen) == {(step, rank) for step in range(len(expected.anchors)) for rank in range(WORKERS)}
    for (step, rank), (copy, anchor) in seen.items():
        assert anchor == pytest.approx(expected.anchors[step], rel=0, abs=within), f"the anchor before step {step}"
        assert copy == pytest.approx(expected.copies[step][rank], rel=0, abs=within), f"before step {step}, {rank}"
    assert final == pytest.approx(expected.final, rel=0, abs=within)


# --- formulas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", RULES)
def test_it_is_its_formula(spelling: str) -> None:
    found = trained(f"{spelling} / bsp / direct", batches())
    agrees(found, simulated(spelling, batches()), 1e-12)
    copies = [[found[0][step, rank][0] for rank in range(WORKERS)] for step in range(2, STEPS)]
    apart = [step for step in copies if step[0] != step[1]]
    assert bool(apart) != (spelling == "average(every=1)")  # copies are really apart between merges


@pytest.mark.parametrize(
    "spelling", ["average(every=3)", "block_momentum(every=3, momentum=0.5, lr=0.9)", "sma(every=1)"]
)
@pytest.mark.parametrize("processes", [4, 3])
def test_workers_count_by_their_samples_since_the_last_merge(spelling: str, processes: int) -> None:
    data = batches(uneven=True)
    assert len({len(x) for x, _ in data}) > 2 and len(data) % WORKERS == 2
    agrees(trained(f"{spelling} / bsp / direct", data, processes), simulated(spelling, data), 1e-12)


def test_fragments_count_samples_since_they_were_sent() -> None:
    spelling, data = "streaming(every=5, fragments=3, delay=2)", batches(uneven=True)
    agrees(trained(f"{spelling} / bsp / direct", data), simulated(spelling, data), 1e-12)


ALONE = (
    *("average(every=3)", "post_local(every=4, switch_at=3)", "block_momentum(every=3, momentum=0.0)"),
    *("outer(every=3, lr=1.0, momentum=0.0)", "streaming(every=4, fragments=3, delay=0, lr=1.0, momentum=0.0)"),
)
"""One worker's own model moves the anchor to it."""


@pytest.mark.parametrize("spelling", ALONE)
def test_one_worker_trains_as_without_weft(spelling: str) -> None:
    ((seen, final, _),) = spawn(1, learn, batches(), WEFT_STRATEGY=f"{spelling} / bsp / direct")
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for step, batch in enumerate(batches()):
        copy = flat(p.detach().numpy() for p in model.parameters())
        assert seen[step, 0][0] == pytest.approx(copy, rel=0, abs=1e-12)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    assert final == pytest.approx(flat(p.detach().numpy() for p in model.parameters()), rel=0, abs=1e-12)


def test_averaging_in_every_step_is_one_optimizer() -> None:
    """With SGD, momentum and batches of equal size."""
    averaged, one = (trained(f"{first}bsp / direct", batches()) for first in ("average / ", ""))
    assert averaged[1] == pytest.approx(one[1], rel=0, abs=1e-10)
    for at, (copy, _) in one[0].items():
        assert averaged[0][at][0] == pytest.approx(copy, rel=0, abs=1e-10)


SAME = [
    ("outer(every=3, lr=1.0, momentum=0.0)", "average(every=3)"),
    ("block_momentum(every=3, momentum=0.0)", "average(every=3)"),
    ("post_local(every=3)", "average(every=3)"),
    ("streaming(every=3, fragments=1, delay=0)", "outer(every=3)"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
@pytest.mark.parametrize("rest", ["bsp / direct", "bsp / ring / int8(block=8)"])
def test_answers_that_are_others_with_certain_values_give_the_same_bits(one: str, other: str, rest: str) -> None:
    assert trained(f"{one} / {rest}", batches()) == trained(f"{other} / {rest}", batches())


# --- what carries it out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", BRIEFLY)
def test_processes_and_buckets_change_no_bit(spelling: str) -> None:
    strategy, data = f"{spelling} / bsp / direct", batches(uneven=True)
    expected = trained(strategy, data)
    for processes, bucket in ((3, 0), (1, 0), (4, 16), (3, 64)):
        assert trained(strategy, data, processes, bucket) == expected, f"{processes} processes, {bucket} B"


@pytest.mark.parametrize("topology", ["ring", "tree", "halving_doubling", "recursive_doubling"])
@pytest.mark.parametrize("spelling", ["outer(every=3)", "streaming(every=4, fragments=2)"])
def test_other_topologies_differ_by_rounding_alone(spelling: str, topology: str) -> None:
    direct, other = (trained(f"{spelling} / bsp / {how}", batches()) for how in ("direct", topology))
    assert other[1] == pytest.approx(direct[1], rel=0, abs=1e-10)
    for at, (copy, anchor) in direct[0].items():
        assert other[0][at][0] == pytest.approx(copy, rel=0, abs=1e-10)
        assert other[0][at][1] == pytest.approx(anchor, rel=0, abs=1e-10)


CALM = (
    *("average(every=3)", "post_local(every=4, switch_at=3)", "block_momentum(every=3, momentum=0.5)"),
    *("sma(every=2, momentum=0.5)", "outer(every=3, momentum=0.5)", "streaming(every=4, fragments=2, momentum=0.5)"),
)


@pytest.mark.parametrize("compression", ["", " / int8(block=8)", " / error_feedback(topk(ratio=0.5))"])
@pytest.mark.parametrize("spelling", CALM)
def test_it_converges_on_a_noisy_quadratic(spelling: str, compression: str) -> None:
    """The loss falls to the noise of the samples, of variance 0.01."""
    data = batches(150)
    _, final, _ = trained(f"{spelling} / bsp / direct{compression}", data, processes=1, lr=0.01)
    before, after = (sum(_loss(model, batch) for batch in data) / len(data) for model in (_start(), final))
    assert before > 1 and after < 0.013


def _start() -> list[float]:
    return flat(p.detach().numpy() for p in build().parameters())


def _loss(values: list[float], batch: Batch) -> float:
    out, at = batch[0].numpy(), 0
    for p_in, p_out in itertools.pairwise(numpy_.SIZES):
        weight = np.array(values[at : at + p_in * p_out]).reshape(p_out, p_in)
        bias = np.array(values[at + p_in * p_out : at + p_in * p_out + p_out])
        out, at = out @ weight.T + bias, at + p_in * p_out + p_out
    return float(((out - batch[1].numpy()) ** 2).mean())


# --- what it costs ----------------------------------------------------------------------------------------------------


def wide(steps: int) -> int:
    """Float32 layers of about 64 KiB, large beside messages; returns the number of parameters."""
    run = weft.init(steps=steps)
    torch.manual_seed(1)
    model: Any = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = run.distribute(model, optimizer)
    rng = torch.Generator().manual_seed(2)
    for x in run.shard([torch.randn(2, 128, generator=rng) for _ in range(2 * steps)]):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return sum(p.numel() for p in model.parameters())


PERIODIC = (
    *("average(every=3)", "post_local(every=4, switch_at=3)", "block_momentum(every=3)", "sma(every=2)"),
    *("outer(every=3)", "streaming(every=4, fragments=2, delay=1)", "streaming(every=6, fragments=4, delay=0)"),
)


@pytest.mark.parametrize("rest", ["bsp / direct", "bsp / ring", "bsp / direct / int8"])
@pytest.mark.parametrize("spelling", PERIODIC)
def test_a_period_sends_the_declared_bytes(spelling: str, rest: str, tmp_path: Path) -> None:
    """Over three periods, and as many steps as their last result takes."""
    strategy = Strategy.parse(f"{spelling} / {rest}")
    answer = strategy.optimization
    assert isinstance(answer, ModelMerging)
    first = answer.period if spelling.startswith("post_local") else 0
    steps = first + 3 * answer.period + getattr(answer, "delay", 0)
    spawn(2, wide, steps, WEFT_STRATEGY=str(strategy), WEFT_OUT=str(tmp_path), WEFT_SAVE_EVERY="0")
    told = events(tmp_path)[first:]
    layers = [Spec(f"{at}.{name}", shape, torch.float32) for at in range(4) for name, shape in SHAPES.items()]
    declared = strategy.wire_bytes(layers, 2) * answer.pushes * 3 * answer.period
    assert sum(event["wire_bytes"] for event in told) / 2 == pytest.approx(declared, rel=1e-3)
    merging = [event for event in told if event.get("merges")]
    assert len(merging) == 3 * answer.num_fragments
    assert all(event["merge_s"] >= 0 and event["consensus"] > 0 for event in merging)
    due = {merge.finish_step + 1 for step in range(steps) for merge in answer.due(step)}
    assert {event["step"] for event in merging} == {step for step in due if first < step <= steps}
    if "delay=1" not in spelling:
        assert {event["wire_bytes"] for event in told if not event.get("merges")} == {0}


SHAPES = {"weight": (128, 128), "bias": (128,)}


@pytest.mark.parametrize("processes", [4, 3])
def test_consensus_is_the_distance_of_the_copies_from_their_mean(processes: int, tmp_path: Path) -> None:
    spelling, data = "outer(every=3)", batches(uneven=True)
    env = {"WEFT_STRATEGY": f"{spelling} / bsp / direct", "WEFT_OUT": str(tmp_path), "WEFT_SAVE_EVERY": "0"}
    spawn(processes, learn, data, workers=WORKERS, **env)
    told = {event["step"]: event["consensus"] for event in events(tmp_path) if "consensus" in event}
    expected = simulated(spelling, data).consensus
    assert set(told) == {3, 6, 9} and told == pytest.approx({step: expected[step] for step in told}, rel=1e-6)
