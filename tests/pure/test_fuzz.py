"""Whatever a file or a spelling says, the answer is a value or one sentence: no crash, no hang, bounded memory.

Inputs are right ones, spoiled: bytes changed, cut out, doubled, pieces of other inputs put in, values replaced. A seed
names each of them. Ten thousand here, a million by `make soak`.
"""

from __future__ import annotations

import hashlib
import json
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pure.made_checkpoints import make, resealed
from weft.errors import UserError
from weft.profile import Measured, Profile
from weft.runtime.record.describe import launched
from weft.runtime.record.run_folder import events, model, summary
from weft.store import checkpoint, shards
from weft.store.plain import value
from weft.strategy import Strategy

COUNTS = {"manifests": 3000, "shards": 1500, "spellings": 3500, "run folders": 2000}
assert sum(COUNTS.values()) == 10**4
PATIENCE_S = 10
ROOM_KIB = 2**18

ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    2**63,
    2**200,
    1e308,
    "",
    "x",
    "\0",
    "../..",
    [],
    {},
    [[]],
    {"tensor": "x"},
    {"map": 3},
]
ODD += [{"pairs": [[[], 1]]}, {"bytes": "zz"}, {"dtype": "load"}, {"float": "1e5"}, {"tuple": {}}, "step-1", [1, 2, 3]]
BYTES = [
    b"\0",
    b"\xff",
    b"{",
    b"}",
    b"[",
    b'"',
    b",",
    b"9" * 400,
    b"-",
    b"e999",
    b"NaN",
    b"[" * 3000,
    b"\xf0\x9f",
    b"\n",
    b"()",
]
SPELLINGS = [
    "bsp / ring / error_feedback(topk(ratio=0.05)) / wfbp",
    "bsp / direct / cast(dtype=bf16) / fused(bucket=25MiB, first=1MiB)",
    "asp / halving_doubling / priority(partition=4MiB, credit=16MiB, least=64KiB)",
    "replicated / gradient / bsp / recursive_doubling / dense / mg_wfbp",
]


def spoiled(content: bytes, dice: random.Random) -> bytes:
    """A few bytes changed, cut out, doubled or put in."""
    whole = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(whole) + 1)
        match dice.randrange(5):
            case 0 if at < len(whole):
                whole[at] = dice.randrange(256)
            case 1:
                del whole[at : at + dice.randint(1, 1 + len(whole) // 4)]
            case 2:
                whole[at:at] = whole[at : at + dice.randint(1, 40)]
            case 3:
                whole[at:at] = dice.choice(BYTES)
            case _:
                other = dice.randrange(len(whole) + 1)
                whole[at:at] = whole[other : other + dice.randint(1, 20)]
    return bytes(whole)


def replaced(table: Any, dice: random.Random) -> Any:
    """The same JSON with one value, somewhere in it, replaced, removed or put elsewhere."""
    table = json.loads(json.dumps(table))
    at: Any = table
    while isinstance(at, (dict, list)) and at:
        key: Any = dice.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if not isinstance(at[key], (dict, list)) or not at[key] or dice.random() < 0.2:
            if dice.random() < 0.2:
                del at[key]
            else:
                at[key] = dice.choice(ODD)
            return table
        at = at[key]
    return dice.choice(ODD)


@contextmanager
def bounded() -> Iterator[None]:
    """Nobody waits longer, nor takes more memory."""

    def too_long(*_: Any) -> None:
        raise AssertionError(f"no answer after {PATIENCE_S} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    usual = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(PATIENCE_S)
    said = "nothing is wrong"
    try:
        yield
    except UserError as error:
        said = str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, usual)
    assert said.strip(), "an error without a word"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < ROOM_KIB


def fuzz_manifests(folder: Path, seeds: range) -> None:
    place = make(folder, 3)
    text = (place / "manifest.json").read_bytes()
    good = json.loads(text)
    for seed in seeds:
        dice = random.Random(seed)
        resealed(place, spoiled(text, dice) if seed % 3 == 0 else replaced(good, dice))
        with bounded():
            manifest = checkpoint.read_manifest(place)
            tensors = checkpoint.load(place, manifest, ["model", "worker-0", "worker-1"])
            for tree in manifest.state.values():
                try:
                    value(tree, tensors)
                except ValueError as error:
                    raise UserError(str(error)) from None


def fuzz_shards(folder: Path, seeds: range) -> None:
    path = folder / "a.safetensors"
    shards.write(path, {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)})
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    for seed in seeds:
        dice = random.Random(seed)
        content = spoiled(good, dice)
        if seed % 2:
            header = json.dumps(replaced(json.loads(good[8 : 8 + length]), dice)).encode()
            content = len(header).to_bytes(8, "little") + header + good[8 + length :]
        path.write_bytes(content)
        with bounded():
            shards.read(path, shards.Seal(len(content), (hashlib.sha256(content).hexdigest(),)))


def fuzz_spellings(_: Path, seeds: range) -> None:
    for seed in seeds:
        dice = random.Random(seed)
        text = spoiled(dice.choice(SPELLINGS).encode(), dice).decode(errors="replace")
        with bounded():
            strategy = Strategy.parse(text)
            assert Strategy.parse(str(strategy)) == strategy


def fuzz_run_folders(folder: Path, seeds: range) -> None:
    launch = {"job": "wide", "args": ["--size", "tiny"], "workers": 4, "processes": 2, "strategy": "bsp / ring"}
    launch |= {"steps": 9, "seed": None, "device": "cpu", "share_gpus": False, "policy": [500, 2, 0]}
    step = {"step": 1, "time_s": 1.0, "step_s": 0.5, "wire_bytes": 9, "samples": 3, "loss": 0.5, "attempt": 1}
    good = {
        "launch.json": json.dumps(launch),
        "environment.json": json.dumps({"strategy": "bsp / ring", "period": 1, "workers": 4}),
        "events-0.jsonl": f"{json.dumps(step)}\n{json.dumps(step | {'step': 2})}\n",
        "report.json": json.dumps({"held_out_loss": 0.3}),
        "model.json": json.dumps([["w", [3, 4], "float32"]]),
        "seen.json": json.dumps({"ready_s": {"w": 0.1}, "cost": {"points": [[1024, 0.1]]}, "fill_s": 0.0}),
        "profile.json": json.dumps({"forward_s": 0.1, "backward": [["w", 0.1]], "optimizer_s": 0.1}),
    }
    readers: list[Callable[[], Any]] = [lambda: launched(folder), lambda: summary(folder), lambda: events(folder)]
    readers += [lambda: model(folder), lambda: Measured.read(folder / "seen.json")]
    readers += [lambda: Profile.read(folder / "profile.json"), lambda: checkpoint.newest(folder / "checkpoints")]
    for seed in seeds:
        dice = random.Random(seed)
        for name, text in good.items():
            (folder / name).write_text(text)
        name = dice.choice(list(good))
        if seed % 2 and name != "events-0.jsonl":
            (folder / name).write_text(json.dumps(replaced(json.loads(good[name]), dice)))
        else:
            (folder / name).write_bytes(spoiled(good[name].encode(), dice))
        for reader in readers:
            with bounded():
                reader()


KINDS = {
    "manifests": fuzz_manifests,
    "shards": fuzz_shards,
    "spellings": fuzz_spellings,
    "run folders": fuzz_run_folders,
}


@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_inputs(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path, range(COUNTS[kind]))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_a_million_inputs(tmp_path: Path, kind: str, part: int) -> None:
    size = 10 * COUNTS[kind]
    KINDS[kind](tmp_path, range(part * size, (part + 1) * size))
