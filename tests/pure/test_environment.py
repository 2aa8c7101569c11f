"""The environment variables: one home, a typed value for each, and one sentence for a value that is not accepted."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import weft
from weft import environment
from weft.environment import (
    GROUPS,
    LabOptions,
    LocalLauncher,
    ProcessPlace,
    RunOptions,
    Timeouts,
    UserSettings,
    Variables,
)
from weft.errors import UserError

HOME = Path(weft.__file__).parent
ROOT = Path(__file__).parents[2]
OF_TESTS = {"FUZZ_FRAMES"}
"""Variables that only the tests read."""

SET: dict[type[Variables], Variables] = {
    ProcessPlace: ProcessPlace(
        rank=0,
        world_size=4,
        local_rank=0,
        local_world_size=2,
        workers=8,
        server=0,
        rendezvous="[::1]:29500",
        network="untrusted",
        share_gpus=True,
    ),
    RunOptions: RunOptions(
        job=Path("a folder/job.py"),
        strategy="bsp / ring",
        strategy_source="the system ddp",
        steps=0,
        seed=-1,
        device="cpu",
        out=Path("runs/a"),
        trace=True,
        resume=Path("/runs/b"),
        save_every=0,
        keep_last=2,
        keep_every=100,
    ),
    LocalLauncher: LocalLauncher(
        pid=0,
        failures=Path("/tmp/a"),
        progress_fd=0,
        store="",
        server_addresses=Path("b"),
        key_file=Path("key"),
    ),
    LabOptions: LabOptions(
        host="lab 0 -", slow="4x@10%", sleep=Path("p.json"), profile=Path("q.json"), peer="ddp", marks=(5, 30)
    ),
    UserSettings: UserSettings(
        strategy="asp / ring", path="mine:yours", kernels="plain", fork="0", sanitize=True, force=True
    ),
    Timeouts: Timeouts(timeout_s=0.25, peer_timeout_s=1e-3),
}
"""A value of each group, in which every variable is set."""


@pytest.mark.parametrize("group", SET, ids=lambda group: group.__name__)
def test_what_is_written_is_read_back(group: type[Variables]) -> None:
    env = SET[group].to_env()
    assert sorted(env) == sorted(group.names().values()) and group.from_env(env) == SET[group]
    assert group.from_env(group().to_env()) == group() == group.from_env({})


def test_every_group_is_here_and_no_variable_is_in_two() -> None:
    assert set(Variables.__subclasses__()) == set(SET)
    assert set(GROUPS) == set(SET)
    names = [name for group in SET for name in group.names().values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("group", "name", "value", "accepted"),
    [
        (ProcessPlace, "RANK", "first", "a whole number"),
        (ProcessPlace, "WEFT_WORKERS", "2.5", "a whole number"),
        (ProcessPlace, "WEFT_NETWORK", "safe", "trusted or untrusted"),
        (ProcessPlace, "WEFT_SHARE_GPUS", "yes", "1 or 0"),
        (RunOptions, "WEFT_KEEP_LAST", "all", "a whole number"),
        (LabOptions, "WEFT_MARKS", "5;30", "whole numbers with commas between them"),
        (UserSettings, "WEFT_KERNELS", "off", "plain"),
        (Timeouts, "WEFT_TIMEOUT_S", "0", "a number of seconds above 0, as in 2.5"),
    ],
)
def test_another_value_is_refused(group: type[Variables], name: str, value: str, accepted: str) -> None:
    with pytest.raises(UserError) as error:
        group.from_env({name: value})
    assert str(error.value) == f"{name} is '{value}', but must be {accepted}"


def test_empty_means_not_set_except_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*RunOptions.names().values(), "WEFT_STORE"]:
        monkeypatch.setenv(name, "")
    assert RunOptions.from_env() == RunOptions(strategy="", strategy_source="", device="")
    assert LocalLauncher.from_env().store == ""


def test_0_is_false() -> None:
    assert ProcessPlace.from_env({"WEFT_SHARE_GPUS": "0"}) == ProcessPlace()


# --- one home -------------------------------------------------------------------------------------------------------


def spelled(tree: ast.AST) -> set[str]:
    """Names of variables in the constants of a module; prose, which has spaces, is exempt."""
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text for text in texts if "WEFT_" in text and not re.search(r"\s", text)}


def test_no_other_module_spells_a_variable() -> None:
    found = {
        str(file.relative_to(HOME)): names
        for file in sorted(HOME.rglob("*.py"))
        if (names := spelled(ast.parse(file.read_text(encoding="utf-8"))))
    }
    assert set(found) == {"environment.py"}
    assert found["environment.py"] - {"WEFT_"} == {
        name for group in SET for name in group.names().values() if name.startswith("WEFT_")
    }


def test_every_variable_says_what_it_is() -> None:
    """One sentence under each field."""
    tree = ast.parse(Path(environment.__file__).read_text(encoding="utf-8"))
    for group in (node for node in tree.body if isinstance(node, ast.ClassDef) and _is_group(node)):
        for field, under in zip(group.body[1::2], group.body[2::2], strict=True):
            assert isinstance(field, ast.AnnAssign), ast.unparse(field)
            assert isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant), ast.unparse(field)


def _is_group(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Variables" for base in node.bases)


def test_the_documentation_names_known_variables_only() -> None:
    pages: list[Any] = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = {name for page in pages for name in re.findall(r"WEFT_[A-Z_]+", page.read_text(encoding="utf-8"))}
    assert named <= spelled(ast.parse(Path(environment.__file__).read_text(encoding="utf-8"))) | OF_TESTS
