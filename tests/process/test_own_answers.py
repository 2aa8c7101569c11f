"""One file is one answer: a file in a folder of the user's own is found, checked, trained with, and really called."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.commands import WEFT, Command

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"`mine/(\w+/(\w+)\.py)`:\n\n```python\n(.*?)```.*?```\n(.*?)```", re.DOTALL)
EXAMPLES = EXAMPLE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
"""By example of CONTRIBUTING.md: its file, its name, the code, and the commands that follow."""

HEAD = """
from __future__ import annotations
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

def observed(what):
    Path(os.environ["OBSERVED"], what).touch()
"""
FILES = {
    "compression/flipped.py": """
from weft.compression import Compressor
from weft.ops import Round, Sum
import torch

@final
@dataclass(frozen=True, kw_only=True)
class Flipped(Compressor):
    \"\"\"Gradients with the opposite sign on the wire: decoded to the same bits.\"\"\"

    lossless: ClassVar[bool] = True

    def exchange(self, bucket, state, ctx):
        observed(f"exchange-{ctx.workers}")
        total = yield Sum(-torch.cat([piece.grad for piece in bucket.pieces]))
        for piece, mean in zip(bucket.pieces, total.split([p.mean.numel() for p in bucket.pieces])):
            piece.mean.copy_(-mean)
        return state

    def rounds(self, specs, workers):
        return (Round(Sum, sum(spec.nbytes for spec in specs)),)
""",
    "topology/star.py": """
from weft.ops import All, Recv, Scatter, Send, Sum
from weft.topology import CollectiveTopology
from weft.topology._parts import pairwise, pairwise_seconds
from weft.topology.direct import Direct

@final
@dataclass(frozen=True, kw_only=True)
class Star(CollectiveTopology):
    \"\"\"Everybody sends to worker 0, which sends the sum back.\"\"\"

    exact: ClassVar[bool] = False

    def lower(self, op, me, place):
        if isinstance(op, Scatter):
            return (yield from pairwise(op, me, place))
        if isinstance(op, All):
            return (yield from Direct().lower(op, me, place))
        observed(f"lower-{me}")
        total = op.payload.clone()
        if me:
            yield Send(0, (total,))
            (total,) = yield Recv(0, (total,))
            return total
        for other in range(1, place.workers):
            (theirs,) = yield Recv(other, (total,))
            total = total + theirs
        for other in range(1, place.workers):
            yield Send(other, (total.clone(),))
        return total

    def seconds(self, op, nbytes, place):
        if op is not Sum:
            return pairwise_seconds(nbytes, place)
        return 2 * (place.workers - 1) * (place.latency_s + nbytes / place.bytes_per_s)

    def wire_bytes(self, op, nbytes, workers):
        return float((workers - 1) * nbytes)
""",
    "synchrony/uneven.py": """
from weft.synchrony import Synchrony

@final
@dataclass(frozen=True, kw_only=True)
class Uneven(Synchrony):
    \"\"\"Worker 0 may be three steps ahead, every other worker one.\"\"\"

    lockstep: ClassVar[bool] = False

    def may_start(self, me, view):
        observed(f"may_start-{me}")
        return view.clocks[me] - view.slowest <= (3 if me == 0 else 1)

    def quorum(self, view):
        return 1

    def correct(self, grad, now, read, staleness):
        return grad
""",
    "optimization/halfway.py": """
from weft.optimization import Exchange, LocalSteps

@final
@dataclass(frozen=True, kw_only=True)
class Halfway(LocalSteps):
    \"\"\"A worker that meets the servers every second step, half way.\"\"\"

    @property
    def period(self):
        return 2

    def local_update(self, param, grad, hyper):
        observed("local_update")
        param.add_(grad, alpha=-float(hyper["lr"]) / 2)

    def due(self, step):
        observed("due")
        return (Exchange(what="gradient"), Exchange(what="model")) if step % 2 else ()

    def merge(self, side, mine, theirs, state):
        observed(f"merge-{side}")
        return (mine + theirs) / 2, state
""",
    "optimization/every_second.py": """
from weft.optimization import Merge, ModelMerging

@final
@dataclass(frozen=True, kw_only=True)
class EverySecond(ModelMerging):
    \"\"\"Models are averaged after every second step; the anchor goes a little further.\"\"\"

    @property
    def period(self):
        return 2

    def due(self, step):
        observed("due")
        return (Merge(finish_step=step),) if step % 2 else ()

    def merge(self, anchor, difference, state, workers):
        observed(f"merge-{workers}")
        return anchor - 1.1 * difference, {"merges": state.get("merges", 0 * difference) + 1}

    def adopt(self, copy, before, after, workers):
        observed("adopt")
        return after
""",
    "schedule/pairs.py": """
from weft.schedule import Schedule
from weft.schedule._wave import wave

@final
@dataclass(frozen=True, kw_only=True)
class Pairs(Schedule):
    \"\"\"Two parameters at a time.\"\"\"

    def timetable(self, specs, rounds, seen=None):
        observed("timetable")
        return wave([list(specs[at : at + 2]) for at in range(0, len(specs), 2)], rounds)
""",
    "synchrony/sent_ahead.py": """
from weft.synchrony import Synchrony

@final
@dataclass(frozen=True, kw_only=True)
class SentAhead(Synchrony):
    \"\"\"Servers send new versions by themselves; a worker may be two steps ahead.\"\"\"

    lockstep: ClassVar[bool] = False

    @property
    def eager(self):
        return True

    def may_start(self, me, view):
        if "WEFT_SERVER" not in os.environ:
            observed("may_start-in-worker")  # a prefetching worker asks by itself
        return view.clocks[me] - view.slowest <= 2

    def quorum(self, view):
        return 1

    def correct(self, grad, now, read, staleness):
        return grad
""",
    "schedule/last_first.py": """
from weft.schedule import Schedule, Slot, Timetable
from weft.schedule._wave import of_one_dtype

@final
@dataclass(frozen=True, kw_only=True)
class LastFirst(Schedule):
    \"\"\"One bucket for each parameter, front layers first; the next forward does not wait.\"\"\"

    defers: ClassVar[bool] = True

    def timetable(self, specs, rounds, seen=None):
        observed("timetable-deferred")
        buckets = tuple((spec,) for spec in specs)
        order = reversed(range(len(buckets)))
        slots = [Slot(at, turn) for at in order for turn in range(len(rounds(buckets[at])))]
        return Timetable(buckets, tuple(slots))
""",
    "compression/heavy_ball.py": """
from weft.compression import Compressor
from weft.ops import Round, Sum
import torch

@final
@dataclass(frozen=True, kw_only=True)
class HeavyBall(Compressor):
    \"\"\"Sums the workers' momenta instead of their gradients.\"\"\"

    claims: ClassVar[tuple[str, ...]] = ("momentum",)

    @property
    def approximates(self):
        return False

    def exchange(self, bucket, state, ctx):
        for piece in bucket.pieces:
            memory = state.setdefault(piece.spec.name, {})
            velocity = memory.setdefault("velocity", torch.zeros_like(piece.grad))
            velocity.mul_(ctx.momentum).add_(piece.grad)
        observed(f"momentum-{ctx.momentum}")
        total = yield Sum(torch.cat([state[piece.spec.name]["velocity"] for piece in bucket.pieces]))
        for piece, mean in zip(bucket.pieces, total.split([p.mean.numel() for p in bucket.pieces])):
            piece.mean.copy_(mean)
        return state

    def rounds(self, specs, workers):
        return (Round(Sum, sum(spec.nbytes for spec in specs)),)
""",
    "compression/from_factors.py": """
from weft.compression import Compressor
from weft.ops import Round, Sum
import torch

@final
@dataclass(frozen=True, kw_only=True)
class FromFactors(Compressor):
    \"\"\"The gradients of linear layers, multiplied out from their factors.\"\"\"

    factors: ClassVar[bool] = True

    def exchange(self, bucket, state, ctx):
        grads = []
        for piece in bucket.pieces:
            if piece.factors is None:
                grads.append(piece.grad)
                continue
            left, right = piece.factors
            observed("factors")
            grads.append((left.T @ right).reshape(-1))
        total = yield Sum(torch.cat(grads))
        for piece, mean in zip(bucket.pieces, total.split([p.mean.numel() for p in bucket.pieces])):
            piece.mean.copy_(mean)
        return state

    def rounds(self, specs, workers):
        return (Round(Sum, sum(spec.nbytes for spec in specs)),)
""",
    "partition/halves.py": """
from weft.partition import Partition

@final
@dataclass(frozen=True, kw_only=True)
class Halves(Partition):
    \"\"\"Half of the model on each worker.\"\"\"
""",
}
JOB = """
import torch, weft
run = weft.init(steps=6)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
model, optimizer = run.distribute(model, optimizer)
data = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
for x in run.shard(torch.utils.data.DataLoader(data, batch_size=4), epochs=None):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=loss)
"""


@pytest.fixture
def mine(scratch: Path) -> dict[str, str]:
    for name, text in FILES.items():
        (scratch / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / "mine" / name).write_text(HEAD + text)
    (scratch / "job.py").write_text(JOB)
    (scratch / "observed").mkdir()
    return {"WEFT_PATH": str(scratch / "mine"), "OBSERVED": str(scratch / "observed")}


def test_contributing_has_examples_of_two_questions() -> None:
    assert [file for file, *_ in EXAMPLES] == ["compression/halved.py", "synchrony/median_bound.py"]


@pytest.mark.parametrize(("file", "name", "code", "commands"), EXAMPLES, ids=[name for _, name, *_ in EXAMPLES])
def test_an_answer_of_ones_own_is_one_file(file: str, name: str, code: str, commands: str, scratch: Path) -> None:
    """CONTRIBUTING.md as it stands: the file shows in the catalogue, is checked, trains, and is held to the laws."""
    (scratch / "mine" / file).parent.mkdir(parents=True)
    (scratch / "mine" / file).write_text(code)
    env = os.environ | {"WEFT_PATH": str(scratch / "mine")}
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    said = {}
    for program, first, *more in map(shlex.split, commands.splitlines()):
        started = [*WEFT, first] if program == "weft" else [*pytest_here, str(ROOT / first)]
        done = subprocess.run(
            [*started, *more], cwd=scratch, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said[first] = done.stdout
    assert list(said) == ["answers", "check", "train", "tests/pure/laws"]
    assert re.search(rf"^ +{name} ", said["answers"], re.MULTILINE) and name in said["check"]
    assert re.search(rf"workers, .*\b{name}\b", said["train"]) and " passed" in said["tests/pure/laws"]


@pytest.mark.parametrize(
    ("strategy", "calls"),
    [
        ("bsp / ring / flipped", {"exchange-2"}),
        ("bsp / parameter_server / flipped", {"exchange-1"}),
        ("bsp / star", {"lower-0", "lower-1"}),
        ("uneven / parameter_server", {"may_start-0", "may_start-1"}),
        ("halfway / asp / parameter_server", {"local_update", "due", "merge-worker"}),
        ("every_second / bsp / ring", {"due", "merge-2", "adopt"}),
        ("bsp / direct / pairs", {"timetable"}),
        ("sent_ahead / parameter_server", {"may_start-in-worker"}),
        ("bsp / direct / last_first", {"timetable-deferred"}),
        ("bsp / direct / heavy_ball", {"momentum-0.5"}),
        ("bsp / direct / from_factors", {"factors"}),
    ],
)
def test_an_answer_in_one_file_trains(
    strategy: str, calls: set[str], mine: dict[str, str], scratch: Path, weft: Command
) -> None:
    done = weft("train", "job.py", "-n", 2, "--strategy", strategy, "--json", "-", cwd=scratch, **mine)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["strategy"] == strategy and summary["steps"] == 6
    assert {file.name for file in (scratch / "observed").iterdir()} >= calls


def test_merges_of_ones_own_are_in_the_events(mine: dict[str, str], scratch: Path, weft: Command) -> None:
    """After every second step, with its state in the checkpoint."""
    strategy = "every_second / bsp / direct / int8"
    done = weft("train", "job.py", "-n", 2, "--strategy", strategy, "--out", "run", cwd=scratch, **mine)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (scratch / "run/events-0.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event.get("merges")] == [2, 4, 6]
    assert weft("train", "--resume", "run", "--steps", 8, cwd=scratch, **mine).returncode == 0


def test_momentum_of_ones_own_and_products_of_factors_train_as_dense_gradients_do(
    mine: dict[str, str], scratch: Path, weft: Command
) -> None:
    losses = []
    for strategy in ("bsp / direct", "bsp / direct / heavy_ball", "bsp / direct / from_factors"):
        done = weft("train", "job.py", "-n", 2, "--strategy", strategy, "--json", "-", cwd=scratch, **mine)
        losses.append(json.loads(done.stdout)["final_loss"])
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)


def test_a_lossless_compressor_of_ones_own_changes_no_bit(mine: dict[str, str], scratch: Path, weft: Command) -> None:
    losses = []
    for strategy in ("bsp / direct", "bsp / direct / flipped", "bsp / parameter_server / flipped"):
        done = weft("train", "job.py", "-n", 2, "--strategy", strategy, "--json", "-", cwd=scratch, **mine)
        losses.append(json.loads(done.stdout)["final_loss"])
    assert losses[0] == losses[1] == losses[2]


def test_a_partition_of_ones_own_is_refused_for_now(mine: dict[str, str], scratch: Path, weft: Command) -> None:
    done = weft("check", "halves / bsp / direct", cwd=scratch, **mine)
    assert done.returncode == 2 and "replicated" in done.stderr and len(done.stderr.strip().splitlines()) == 1
