"""What a comparison runs where strategies or peers are not named."""

from __future__ import annotations

from weft.lab import learning
from weft.lab.spec import DEFAULTS, contenders


def names(*args: object, **options: bool) -> list[str]:
    return [contender.name for contender in contenders(*args, **options)]  # type: ignore[arg-type]


def test_without_strategies_the_default_ones_run_beside_ddp() -> None:
    assert names((), ()) == [*DEFAULTS, "ddp"]
    assert names((), ["ddp-fp16", "fsdp"]) == [*DEFAULTS, "ddp-fp16", "fsdp"]


def test_what_is_named_runs_alone() -> None:
    assert names(["bsp / ring"], ()) == ["bsp / ring"]
    assert names(["bsp / ring"], ["ddp"]) == ["bsp / ring", "ddp"]
    assert names([{"mine": "bsp / ring"}], ()) == ["mine"]
    assert names((), ["ddp"], defaults=False) == ["ddp"]


def test_every_default_learns_as_dense_training_does() -> None:
    assert all(learning.as_dense(learning.measured(contender)) for contender in contenders((), ()))
