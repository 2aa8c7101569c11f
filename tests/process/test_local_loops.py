"""Loops under local optimizers do what a loop of each worker would, with averages of plain models in between."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.process.harness import ChildError, spawn
from tests.process.test_local_optimizers import digest
from weft.store.checkpoint import found_in

WORKERS, STEPS, EVERY = 4, 7, 3
Batch = tuple[Tensor, Tensor]
State = dict[str, Tensor]


# --- the same loop with Weft, and by hand -----------------------------------------------------------------------------


class Branched(nn.Module):
    """BatchNorm, a frozen layer, a layer that nobody uses, and one that only large batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8)
        self.frozen, self.unused = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.large, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(torch.tanh(self.norm(self.first(x))))
        return self.last(hidden + self.large(hidden) if len(x) > 4 else hidden)  # type: ignore[no-any-return]


def build() -> Branched:
    torch.manual_seed(1)
    return Branched().double()


def batches(steps: int = STEPS, uneven: bool = False) -> list[Batch]:
    """If uneven, batches have 3 to 6 samples, and the last step has two batches for four workers."""
    rng = torch.Generator().manual_seed(3)
    sizes = [3 + at * 7 % 4 if uneven else 4 for at in range(WORKERS * steps - 2 * uneven)]
    inputs = [torch.randn(size, 5, generator=rng, dtype=torch.float64) for size in sizes]
    return [(x, x[:, :2].sin() + 2) for x in inputs]


def tokens(batch: Batch) -> int:
    """What a batch counts for, if not its samples."""
    return int((batch[0] > 0).sum())


class Loop:
    """One worker's training objects, and a step with them."""

    def __init__(self, kind: str, model: Any) -> None:
        self.kind, self.model = kind, model
        used = [p for p in model.parameters() if p.requires_grad]
        self.optimizer: Any = torch.optim.AdamW(used, lr=0.01)
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)

    def backward(self, batch: Batch, step: int, rank: int) -> None:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        if self.kind != "scaler":
            loss.backward()
            return
        self.scaler.scale(loss).backward()
        if step == 3 and rank == 1:
            self.model.first.weight.grad[0, 0] = torch.inf

    def step(self, clip: Any) -> None:
        if self.kind == "scaler":
            self.scaler.unscale_(self.optimizer)
        if self.kind in ("clip", "scaler"):
            clip(0.05)
        if self.kind == "scaler":
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


def by_weft(kind: str, data: list[Batch], micro: int = 1) -> tuple[State, float, float, int]:
    """The loop in each process; the model in the end, the last learning rate, the scale, and the steps taken."""
    run = weft.init()
    loop = Loop(kind, build())
    followers = [loop.scheduler, *([loop.scaler] if kind == "scaler" else [])]
    loop.model, loop.optimizer, *_ = run.distribute(loop.model, loop.optimizer, *followers)
    by_torch = lambda norm: nn.utils.clip_grad_norm_(loop.model.parameters(), norm)  # noqa: E731
    counts = {"samples": tokens} if kind == "tokens" else {}
    for number, batch in enumerate(run.shard(data, **counts), 1):
        step, rank = run.step + 1, run.rank
        with run.accumulate() if number % micro else contextlib.nullcontext():
            loop.backward(batch, step, rank)
        if number % micro == 0:
            loop.step(run.clip if rank % 2 else by_torch)
    steps = run.step
    run.close()
    return copy.deepcopy(loop.model.state_dict()), loop.optimizer.param_groups[0]["lr"], loop.scaler.get_scale(), steps


def by_hand(kind: str, data: list[Batch], micro: int = 1) -> tuple[State, list[float]]:
    """Four models in one process, averaged every third step and in the end; the model, and each worker's scale."""
    loops = [Loop(kind, build()) for _ in range(WORKERS)]
    samples = [0] * WORKERS
    groups = [data[at : at + WORKERS] for at in range(0, len(data), WORKERS)]
    steps = len(groups) // micro
    for step in range(1, steps + 1):
        for rank, loop in enumerate(loops):
            for group in groups[(step - 1) * micro : step * micro]:
                loop.backward(group[rank] if rank < len(group) else group[0], step, rank)
                if rank < len(group):
                    samples[rank] += tokens(group[rank]) if kind == "tokens" else len(group[rank][0])
            if rank >= len(group):  # a worker without a batch computes on another one's, and takes no step
                loop.optimizer.zero_grad()
                loop.scheduler.step()
                continue
            loop.step(lambda norm, loop=loop: nn.utils.clip_grad_norm_(loop.model.parameters(), norm))
        if step % EVERY == 0 or step == steps:
            merged = average([loop.model.state_dict() for loop in loops], samples)
            for loop in loops:
                loop.model.load_state_dict(merged)
            samples = [0] * WORKERS
    return loops[0].model.state_dict(), [loop.scaler.get_scale() for loop in loops]


def average(states: list[State], samples: list[int]) -> State:
    """Means of floating-point tensors, weighted by samples; the first one's integers."""

    def mean(name: str) -> Tensor:
        rows = [state[name] for state in states]
        if not rows[0].is_floating_point():
            return rows[0].clone()
        return sum((count / sum(samples) * row for count, row in zip(samples, rows, strict=True)), 0 * rows[0])

    return {name: mean(name) for name in states[0]}


def equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-11, msg=lambda why, name=name: f"{name}: {why}")


STRATEGY = f"average(every={EVERY}) / bsp / direct"
LOOPS = {
    "plain": ("plain", batches(), 1),
    "uneven batches": ("plain", batches(STEPS + 1, uneven=True), 1),
    "tokens": ("tokens", batches(STEPS + 1, uneven=True), 1),
    "clipping": ("clip", batches(), 1),
    "accumulate": ("plain", batches(2 * STEPS), 2),
    "accumulate, clipping": ("clip", batches(3 * STEPS), 3),
}


@pytest.mark.parametrize("processes", [4, 3, 1])
@pytest.mark.parametrize("case", LOOPS)
def test_each_worker_runs_the_loop_by_itself(case: str, processes: int) -> None:
    """With a scheduler, BatchNorm, and parameters that are frozen, unused, or used by some workers alone."""
    kind, data, micro = LOOPS[case]
    expected, _ = by_hand(kind, data, micro)
    groups = len(data[::WORKERS])
    assert int(expected["norm.num_batches_tracked"]) == groups
    for found, lr, _, steps in spawn(processes, by_weft, kind, data, micro, workers=WORKERS, WEFT_STRATEGY=STRATEGY):
        equal(found, expected)
        assert steps == groups // micro and lr == 0.01 * 0.5 ** (steps // 2)


def test_a_step_that_a_scaler_skips_for_one_worker_counts() -> None:
    """Worker 1 alone skips the third step, after which models are merged, and halves its scale."""
    expected, scales = by_hand("scaler", batches())
    assert scales == [256.0, 128.0, 256.0, 256.0]
    outcomes = spawn(4, by_weft, "scaler", batches(), WEFT_STRATEGY=STRATEGY)
    for (found, lr, scale, steps), own in zip(outcomes, scales, strict=True):
        equal(found, expected)
        assert (scale, steps, lr) == (own, STEPS, 0.01 * 0.5 ** (STEPS // 2))


def skipping(folder: str) -> list[float]:
    """Train with a scaler; the scale of this worker, and some of the model."""
    gc.collect()  # a run looks for scalers that it was not given, and this process had one in the run before
    run = weft.init(out=folder, steps=STEPS)
    loop = Loop("scaler", build())
    loop.model, loop.optimizer, *_ = run.distribute(loop.model, loop.optimizer, loop.scheduler, loop.scaler)
    for batch in run.shard(batches(), epochs=None):
        loop.backward(batch, run.step + 1, run.rank)
        loop.step(run.clip)
    run.close()
    return [loop.scaler.get_scale(), *loop.model.last.bias.tolist()]


def test_a_resumed_worker_has_its_own_scale(tmp_path: Path) -> None:
    whole = spawn(4, skipping, str(tmp_path / "whole"), WEFT_STRATEGY=STRATEGY, WEFT_SAVE_EVERY="4")
    assert [scale for scale, *_ in whole] == [256.0, 128.0, 256.0, 256.0]
    last = found_in(tmp_path / "whole/checkpoints")[-1]
    assert last.name == "step-00000004"
    env = {"WEFT_STRATEGY": STRATEGY, "WEFT_SAVE_EVERY": "4", "WEFT_RESUME": str(last)}
    assert spawn(4, skipping, str(tmp_path / "again"), **env) == whole


# --- looking, saving and ending ---------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> str:
    return digest(model.state_dict())


def looking(looks: bool) -> tuple[list[tuple[int, str, str]], str]:
    """By step, hashes of anchors as `run.merged` and as `run.evaluate` show them; and of the model in the end."""
    run = weft.init(steps=STEPS)
    loop = Loop("plain", build())
    model, optimizer, scheduler = run.distribute(loop.model, loop.optimizer, loop.scheduler)
    seen = []
    for batch in run.shard(batches(uneven=True), epochs=None):
        if looks:
            mine, rng = snapshot(model), torch.get_rng_state()
            evaluated = {snapshot(model) for _ in run.evaluate([1] * 9)}
            assert snapshot(model) == mine
            with run.merged():
                anchor = snapshot(model)
                assert {snapshot(model) for _ in run.evaluate([1] * 9)} == {anchor}
                with run.merged():
                    assert snapshot(model) == anchor
                assert snapshot(model) == anchor
            assert snapshot(model) == mine
            for _ in run.evaluate([1] * 9):
                assert snapshot(model) == anchor
                break
            assert snapshot(model) == mine
            assert torch.equal(torch.get_rng_state(), rng)
            seen.append((run.step, anchor, *evaluated))
            assert (mine == anchor) == (run.step % EVERY == 0)
        loop.backward(batch, run.step + 1, run.rank)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    run.close()
    return seen, snapshot(model)


@pytest.mark.parametrize("processes", [4, 3, 1])
def test_evaluate_and_merged_show_the_anchor_and_change_nothing(processes: int) -> None:
    looked = spawn(processes, looking, True, workers=WORKERS, WEFT_STRATEGY=STRATEGY)
    plain = spawn(processes, looking, False, workers=WORKERS, WEFT_STRATEGY=STRATEGY)
    assert len({final for _, final in [*looked, *plain]}) == 1
    by_step: dict[int, set[str]] = {}
    for seen, _ in looked:
        for step, *hashes in seen:
            by_step.setdefault(step, set()).update(hashes)
    assert all(len(hashes) == 1 for hashes in by_step.values()) and len(by_step) == STEPS
    assert len(set.union(*by_step.values())) == 1 + (STEPS - 1) // EVERY


def stepping_there(how: str) -> None:
    """Step while the model holds the anchor."""
    run = weft.init(steps=STEPS)
    loop = Loop("plain", build())
    _, optimizer, _ = run.distribute(loop.model, loop.optimizer, loop.scheduler)
    for batch in run.shard(batches()):
        with run.merged() if how == "merged" else contextlib.nullcontext():
            evaluation = iter(run.evaluate([1] * 9))
            if how == "evaluate":
                next(evaluation)
            loop.backward(batch, run.step + 1, run.rank)
            optimizer.step()


@pytest.mark.parametrize("how", ["merged", "evaluate"])
@pytest.mark.parametrize("processes", [2, 1])
def test_a_step_on_the_anchor_is_refused(how: str, processes: int) -> None:
    with pytest.raises(ChildError, match=r"step\(\) inside run.merged\(\) or run.evaluate\(\) would") as caught:
        spawn(processes, stepping_there, how, workers=2, WEFT_STRATEGY=STRATEGY)
    assert caught.value.kind == "LoopError"


def ending(how: str, folder: str) -> tuple[str, str]:
    """Train to the end of the run, one that is no merge by itself; the model before and after `run.close()`."""
    run = weft.init(out=folder, steps=STEPS if how == "steps" else None)
    loop = Loop("plain", build())
    model, optimizer, _ = run.distribute(loop.model, loop.optimizer, loop.scheduler)

    def feed() -> Iterable[Batch]:
        if how == "epochs":
            for _ in run.epochs(1):
                yield from run.shard(batches())
        else:
            yield from run.shard(batches(STEPS + 5 * (how == "steps")))

    for batch in feed():
        loop.backward(batch, run.step + 1, run.rank)
        optimizer.step()
        optimizer.zero_grad()
    before = snapshot(model)
    run.close()
    return before, snapshot(model)


@pytest.mark.parametrize("processes", [4, 1])
@pytest.mark.parametrize("spelling", ["average(every=4)", "sma(every=3)", "streaming(every=6, fragments=3, delay=5)"])
def test_every_end_of_a_run_merges(spelling: str, processes: int, tmp_path: Path) -> None:
    """By steps, by epochs and by closing alone; the last checkpoint, which may be written twice, holds that model."""
    ends = set()
    for how in ("steps", "epochs", "close"):
        env = {"WEFT_STRATEGY": f"{spelling} / bsp / direct", "WEFT_SAVE_EVERY": str(STEPS)}
        found = spawn(processes, ending, how, str(tmp_path / how), workers=WORKERS, **env)
        ends |= {after for _, after in found}
        assert how == "close" or all(before == after for before, after in found)
        assert how != "close" or {before for before, _ in found} != {after for _, after in found}
        ends.add(digest(weft.load(tmp_path / how)))
    assert len(ends) == 1


@pytest.mark.parametrize("processes", [4, 3, 1])
@pytest.mark.parametrize("spelling", ["average(every=4)", "sma(every=3)", "streaming(every=4, fragments=2, delay=3)"])
def test_saving_changes_nothing(spelling: str, processes: int, tmp_path: Path) -> None:
    ends = set()
    for every in ("0", "1"):
        env = {"WEFT_STRATEGY": f"{spelling} / bsp / direct / int8(block=8)", "WEFT_SAVE_EVERY": every}
        ends |= {after for _, after in spawn(processes, ending, "steps", str(tmp_path / every), workers=WORKERS, **env)}
    assert len(ends) == 1


def going_on() -> tuple[State, State]:
    """One more step after the end of `run.epochs`; the local model after it, and the merged one."""
    run = weft.init()
    loop = Loop("plain", build())
    model, optimizer, _ = run.distribute(loop.model, loop.optimizer, loop.scheduler)

    def train(feed: Iterable[Batch]) -> None:
        for batch in feed:
            loop.backward(batch, run.step + 1, run.rank)
            optimizer.step()
            optimizer.zero_grad()

    for _ in run.epochs(1):
        train(run.shard(batches()))
    train(run.shard(batches(1)))
    local = copy.deepcopy(model.state_dict())
    run.close()
    return local, model.state_dict()


@pytest.mark.parametrize("spelling", ["average(every=50)", "streaming(every=50, fragments=2, lr=1.0, momentum=0.0)"])
def test_steps_after_the_end_of_epochs_are_merged_too(spelling: str) -> None:
    found = spawn(WORKERS, going_on, WEFT_STRATEGY=f"{spelling} / bsp / direct")
    mean = average([local for local, _ in found], [1] * WORKERS)
    for _, merged in found:
        equal(merged, mean)


# --- the loop changes the model by itself -----------------------------------------------------------------------------


def loading(when: str) -> str:
    """Load weights before or after `run.distribute`."""
    run = weft.init(steps=STEPS)
    loop = Loop("plain", build())
    weights = {name: value + 1 if value.is_floating_point() else value for name, value in build().state_dict().items()}
    if when == "before":
        loop.model.load_state_dict(weights)
    model, optimizer, _ = run.distribute(loop.model, loop.optimizer, loop.scheduler)
    if when == "after":
        model.load_state_dict(weights)
    assert {snapshot(model) for _ in run.evaluate([1] * 9)} == {digest(weights)}
    for batch in run.shard(batches(), epochs=None):
        loop.backward(batch, run.step + 1, run.rank)
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return snapshot(model)


@pytest.mark.parametrize("processes", [4, 3, 1])
def test_weights_may_be_loaded_after_distribute(processes: int) -> None:
    strategy = "outer(every=3) / bsp / direct"
    ends = [
        end
        for when in ("before", "after")
        for end in spawn(processes, loading, when, workers=WORKERS, WEFT_STRATEGY=strategy)
    ]
    assert len(set(ends)) == 1


def clamping(how: str) -> str:
    """Bound the weights after each step, in place or by other memory."""
    run = weft.init(steps=STEPS)
    loop = Loop("plain", build())
    model, optimizer, _ = run.distribute(loop.model, loop.optimizer, loop.scheduler)
    for batch in run.shard(batches(), epochs=None):
        loop.backward(batch, run.step + 1, run.rank)
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters():
            if how == "in place":
                p.data.clamp_(-0.2, 0.2)
            else:
                p.data = p.data.clamp(-0.2, 0.2)
    with run.merged():
        pass
    run.close()
    return snapshot(model)


@pytest.mark.parametrize("processes", [4, 1])
def test_weights_may_be_replaced_between_steps(processes: int) -> None:
    strategy = "streaming(every=2, fragments=2, delay=2, lr=1.0, momentum=0.0) / bsp / direct"
    ends = [
        end
        for how in ("in place", "replaced")
        for end in spawn(processes, clamping, how, workers=WORKERS, WEFT_STRATEGY=strategy)
    ]
    assert len(set(ends)) == 1


def leaving_early() -> None:
    run = weft.init()
    model: Any = torch.nn.Linear(2, 1)
    model, optimizer = run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for x in run.shard([torch.ones(2, 2)] * (4 if run.is_main else 8)):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()


def test_a_process_without_further_batches_is_named() -> None:
    with pytest.raises(ChildError, match=r"has no more batches"):
        spawn(2, leaving_early, WEFT_STRATEGY="average(every=3) / bsp / direct")
