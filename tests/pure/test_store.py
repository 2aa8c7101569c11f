"""Files of the store: values come back, and a checkpoint is whole or refused."""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.pure.made_checkpoints import make, resealed
from weft.errors import LoopError, UserError
from weft.runtime.checkpoint.writer import check_finite
from weft.store import checkpoint, shards
from weft.store.checkpoint import Manifest, Policy
from weft.store.plain import plain, tensors_in, value
from weft.store.shards import DamagedError

FLIPS_IN_CI = 0.05
scalars = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False) | st.binary(max_size=4)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
def test_plain_values_come_back_through_json(given: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    back = value(json.loads(json.dumps(plain(given, "x", tensors), allow_nan=False)), tensors)
    assert back == given and type(back) is type(given)


def test_what_json_lacks_comes_back_too() -> None:
    state = {
        "milestones": collections.Counter({30: 1, 60: 2}),
        "dtype": torch.bfloat16,
        "losses": (float("inf"), -float("inf")),
        "state": {0: {"exp_avg": torch.arange(3.0), "step": torch.tensor(4)}, 1: {}},
        "a": {"b": torch.ones(1)},
        "a/b": torch.zeros(2),
    }
    tensors: dict[str, torch.Tensor] = {}
    tree = json.loads(json.dumps(plain(state, "s", tensors)))
    back = value(tree, tensors)
    assert back["milestones"] == state["milestones"] and isinstance(back["milestones"], collections.Counter)
    assert back["dtype"] is torch.bfloat16 and back["losses"] == state["losses"]
    assert back["state"][0]["exp_avg"].equal(torch.arange(3.0)) and back["state"][1] == {}
    assert back["a"]["b"].equal(torch.ones(1)) and back["a/b"].equal(torch.zeros(2))


def test_what_cannot_be_held_is_named() -> None:
    with pytest.raises(UserError, match=r"scheduler\.lambdas\.0 is a function"):
        plain({"lambdas": [lambda: 0]}, "scheduler", {})


def some_tensors() -> dict[str, torch.Tensor]:
    return {
        "w": torch.randn(7, 5),
        "half": torch.randn(3).bfloat16(),
        "mask": torch.tensor([True, False, True]),
        "step": torch.tensor(3),
        "none": torch.zeros(0, 4),
        "wide": torch.randn(2).double(),
        "across": torch.randn(4, 6).t(),
    }


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    tensors = some_tensors()
    seal = shards.write(tmp_path / "a.safetensors", tensors)
    theirs, ours = load_file(tmp_path / "a.safetensors"), shards.read(tmp_path / "a.safetensors", seal)
    for name, tensor in tensors.items():
        assert theirs[name].equal(tensor) and theirs[name].dtype == tensor.dtype
        assert ours[name].equal(tensor) and ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape


def test_large_files_are_hashed_while_they_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BLOCK", 104)
    tensors = some_tensors() | {"large": torch.randn(1001)}
    seal = shards.write(tmp_path / "a.safetensors", tensors)
    assert shards.read(tmp_path / "a.safetensors", seal)["large"].equal(tensors["large"])
    shards.check(tmp_path / "a.safetensors", seal)
    content = bytearray((tmp_path / "a.safetensors").read_bytes())
    content[2077] ^= 8
    (tmp_path / "a.safetensors").write_bytes(content)
    for look in (shards.read, shards.check):
        with pytest.raises(DamagedError, match="SHA-256 differs"):
            look(tmp_path / "a.safetensors", seal)


def of_64_kib(root: Path) -> Path:
    """One whose files have 65,536 bytes, all in all."""

    def missing(folder: Path) -> int:
        return 2**16 - sum(file.stat().st_size for file in folder.iterdir())

    count = 14_000 + missing(make(root / "small", 7, 14_000)) // 4 - 20
    folder = make(root / "right", 7, count, name="j" * (1 + missing(make(root / "nearly", 7, count))))
    assert missing(folder) == 0
    return folder


def test_a_checkpoint_is_read_back(tmp_path: Path) -> None:
    folder = make(tmp_path, 12)
    manifest = checkpoint.verify(folder)
    assert folder.name == "step-00000012" and manifest.step == 12 and manifest.workers == 2
    tensors = checkpoint.load(folder, manifest, ["model", "worker-1"])
    assert set(tensors) == {"model/a", "model/b", "worker-1/draws"}
    assert value(manifest.state["model"], tensors)["a"].shape == (100,)
    assert not list(tmp_path.glob(".*")) and not list(folder.glob("piece-*")) and not list(folder.glob("*.tmp"))


def flips(folder: Path) -> Iterator[tuple[Path, int, int]]:
    for file in sorted(folder.iterdir()):
        for at in range(file.stat().st_size):
            for bit in range(8):
                yield file, at, bit


def refuses_all(folder: Path, chosen: list[tuple[Path, int, int]]) -> None:
    checkpoint.verify(folder)
    for file, at, bit in chosen:
        with file.open("r+b", buffering=0) as stream:
            stream.seek(at)
            byte = stream.read(1)[0]
            stream.seek(at)
            stream.write(bytes([byte ^ 1 << bit]))
            try:
                checkpoint.verify(folder)
            except UserError:
                pass
            else:
                raise AssertionError(f"bit {bit} of byte {at} of {file.name} was flipped, and nobody saw it")
            stream.seek(at)
            stream.write(bytes([byte]))
    checkpoint.verify(folder)


def test_a_flipped_bit_is_refused_wherever_it_is(tmp_path: Path) -> None:
    folder = of_64_kib(tmp_path)
    every = list(flips(folder))
    assert len(every) == 524_288
    refuses_all(folder, random.Random(5).sample(every, int(len(every) * FLIPS_IN_CI)))


@pytest.mark.slow
def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    folder = of_64_kib(tmp_path)
    refuses_all(folder, list(flips(folder)))


@pytest.mark.parametrize(
    "name", ["manifest.json", "manifest.sha256", "model-0-of-2.safetensors", "worker-1.safetensors"]
)
def test_a_file_that_is_cut_lengthened_emptied_or_gone_is_refused(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path, 3)
    file = folder / name
    content = file.read_bytes()
    lengths = {0, 1, 7, 8, 9, len(content) // 2, len(content) - 8, len(content) - 2, len(content) - 1}
    for other in [*(content[:length] for length in sorted(lengths)), content + b"\0", content + content, content[1:]]:
        file.write_bytes(other)
        with pytest.raises(DamagedError, match=name.split(".")[0]):
            checkpoint.verify(folder)
    file.unlink()
    with pytest.raises(DamagedError, match="No such file"):
        checkpoint.verify(folder)
    file.mkdir()
    with pytest.raises(DamagedError):
        checkpoint.verify(folder)


def test_the_newest_whole_one_is_found_and_the_damaged_one_named(tmp_path: Path) -> None:
    make(tmp_path, 10)
    (make(tmp_path, 20) / "model-1-of-2.safetensors").write_bytes(b"")
    folder, manifest, refused = checkpoint.newest(tmp_path)
    assert manifest.step == 10 and folder.name == "step-00000010"
    assert len(refused) == 1 and "step-00000020/model-1-of-2.safetensors has 0 bytes" in refused[0]
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is complete"):
        checkpoint.newest(tmp_path)
    with pytest.raises(UserError, match="holds no checkpoint"):
        checkpoint.newest(tmp_path / "elsewhere")


def test_a_newer_format_is_refused_with_a_remedy(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    resealed(folder, json.loads((folder / "manifest.json").read_text()) | {"format": 2})
    with pytest.raises(UserError, match="has format 2, this Weft reads 1; use the newer Weft"):
        checkpoint.newest(tmp_path)


def test_a_file_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    table = json.loads((folder / "manifest.json").read_text())
    table["files"]["../../secret-0.safetensors"] = {"bytes": 3, "sha256": ["0" * 64]}
    resealed(folder, table)
    with pytest.raises(DamagedError, match="a file called"):
        checkpoint.verify(folder)


# --- keeping ----------------------------------------------------------------------------------------------------------


def test_a_policy_keeps_the_last_and_the_milestones(tmp_path: Path) -> None:
    policy = Policy(every=10, last=2, milestone=40)
    assert [step for step in range(1, 45) if policy.due(step)] == [10, 20, 30, 40]
    assert not any(Policy(every=0).due(step) for step in range(9))
    for step in range(10, 101, 10):
        make(tmp_path, step)
        checkpoint.prune(tmp_path, policy, range(10, step + 1, 10))
    assert [checkpoint.step_of(folder) for folder in checkpoint.found_in(tmp_path)] == [100, 90, 80, 40]
    assert not list(tmp_path.glob(".*"))


def test_only_whole_ones_count_as_the_last(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        make(tmp_path, step)
    checkpoint.prune(tmp_path, Policy(last=2), {20})
    assert [checkpoint.step_of(folder) for folder in checkpoint.found_in(tmp_path)] == [40, 30, 20, 10]
    checkpoint.prune(tmp_path, Policy(last=2), {20, 30})
    assert [checkpoint.step_of(folder) for folder in checkpoint.found_in(tmp_path)] == [40, 30, 20]


def test_what_is_newer_than_where_a_run_goes_on_is_set_aside(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make(tmp_path, step)
    (tmp_path / "step-00000030/model-1-of-2.safetensors").unlink()
    aside = checkpoint.set_aside(tmp_path, 10)
    assert sorted(folder.name for folder in aside) == [".abandoned-00000020", ".damaged-00000030"]
    assert checkpoint.newest(tmp_path)[1].step == 10
    assert checkpoint.set_aside(tmp_path, 10) == []
    make(tmp_path, 15)
    checkpoint.set_aside(tmp_path, -1)  # a run starts over: what was abandoned before goes
    assert sorted(each.name for each in tmp_path.iterdir()) == [".abandoned-00000010", ".abandoned-00000015"]
    with pytest.raises(UserError, match="holds no checkpoint"):
        checkpoint.newest(tmp_path)


def test_one_that_misses_a_tensor_is_not_published(tmp_path: Path) -> None:
    """Two processes with different views of what there is to save: each writes its share of its own."""
    part = checkpoint.aside(tmp_path, 5, "token")
    about: dict[str, Any] = {"workers": 2, "strategy": "bsp / direct", "seed": 0, "job": {}}
    tensors: dict[str, torch.Tensor] = {}
    tree = plain({"seen": [torch.ones(1), torch.ones(1)], 7: (torch.ones(2),)}, "followers", tensors)
    assert set(tensors_in(tree)) == set(tensors) and len(tensors) == 3
    held = {name.removeprefix("followers/"): tensor for name, tensor in tensors.items() if name != "followers/seen/1"}
    checkpoint.contribute(part, 0, {"followers-0-of-2.safetensors": held}, {}, "one")
    checkpoint.contribute(part, 1, {}, {}, "another")
    manifest = Manifest(step=5, files={}, state={"followers": tree}, **about)
    with pytest.raises(LoopError, match=r"process 1 has other tensors than process 0 \(followers/seen/1\)"):
        checkpoint.publish(tmp_path, part, 2, manifest, 1.0)
    assert checkpoint.found_in(tmp_path) == []


def test_what_a_manifest_refers_to_is_there(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    table = json.loads((folder / "manifest.json").read_text())
    table["state"]["model"]["map"]["c"] = {"tensor": "model/c"}
    resealed(folder, table)
    with pytest.raises(DamagedError, match="lacks the tensor 'model/c'"):
        checkpoint.verify(folder)


def test_a_failed_save_is_cleared_by_the_next_and_a_later_one_is_left_alone(tmp_path: Path) -> None:
    """A process that has contributed to one save may be at the next before this one has its name."""
    for step in (5, 15):
        checkpoint.contribute(checkpoint.aside(tmp_path, step, "token"), 1, {}, {})
    make(tmp_path, 10)
    assert sorted(each.name for each in tmp_path.iterdir()) == [".part-00000015-token", "step-00000010"]


def test_a_process_that_fails_says_why_and_makes_room(tmp_path: Path) -> None:
    part = checkpoint.aside(tmp_path, 1, "t")
    checkpoint.contribute(part, 0, {}, {})
    checkpoint.contribute(part, 1, {"worker-1.safetensors": {"d": torch.ones(1)}}, {})
    checkpoint.withdraw(part, 1, ["worker-1.safetensors", "model-1-of-2.safetensors"], LoopError("w is not finite"))
    assert sorted(each.name for each in part.iterdir()) == ["piece-0.json", "piece-1.json"]
    manifest = Manifest(step=1, workers=2, strategy="", seed=0, job={}, state={}, files={})
    with pytest.raises(LoopError, match="w is not finite"):
        checkpoint.publish(tmp_path, part, 2, manifest, 1.0)
    checkpoint.withdraw(part, 0, [], LoopError("w is not finite"))
    assert not part.exists()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (torch.float32, [1.0, float("nan")]),
        (torch.float32, [float("inf"), float("-inf")]),
        (torch.bfloat16, [float("inf")]),
        (torch.complex64, [complex(0, float("nan"))]),
        (torch.float8_e5m2, [float("inf")]),
    ],
)
def test_parameters_that_are_not_finite_are_found(kind: torch.dtype, values: list[Any]) -> None:
    files = {"model-0-of-1.safetensors": {"w": torch.tensor(values).to(kind), "mask": torch.tensor([float("-inf")])}}
    with pytest.raises(LoopError, match="The checkpoint of step 4 is not written, because w is NaN or infinite"):
        check_finite(files, {"w"}, 4)
    files["model-0-of-1.safetensors"]["w"] = torch.tensor([6e4, 6e4]).half()  # whose sum overflows
    check_finite(files, {"w"}, 4)
    check_finite({"optimizer-0-of-1.safetensors": {"w": torch.tensor([float("nan")])}}, {"w"}, 4)


def test_one_that_is_made_again_replaces_the_old_one(tmp_path: Path) -> None:
    first = make(tmp_path, 10)
    (first / "manifest.json").write_text("damaged")
    checkpoint.verify(make(tmp_path, 10))


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path) -> None:
    make(tmp_path, 10).rename(tmp_path / ".old-00000010-token")
    for left in (".part-00000020-x", ".gone-00000005"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "piece-0.json").write_text("{}")
    checkpoint.tidy(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000010"]
    checkpoint.verify(tmp_path / "step-00000010")


def test_a_process_that_does_not_come_is_named(tmp_path: Path) -> None:
    part = checkpoint.aside(tmp_path, 1, "t")
    checkpoint.contribute(part, 0, {}, {})
    manifest = Manifest(step=1, workers=2, strategy="", seed=0, job={}, state={}, files={})
    with pytest.raises(UserError, match="process 1 did not write its part"):
        checkpoint.publish(tmp_path, part, 2, manifest, 0.05)
