"""The environment variables of Weft: the name, the type and the meaning of each, in one place.

A launcher writes them with `to_env`, and a process reads them with `from_env` when it needs one, never at import. They
are grouped by the side that sets them: `ProcessPlace` and `RunOptions` come from the launcher and are valid on any
machine, `LocalLauncher` comes from the launcher on this machine, `LabOptions` from the lab, and `UserSettings` and
`Timeouts` from the user.
"""

from __future__ import annotations

import functools
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from weft.errors import UserError, nearest

Network = Literal["trusted", "untrusted"]
"""The network between the machines of a run. An untrusted one carries encrypted messages only."""


def variable(name: str, default: Any = None) -> Any:
    """A field that is an environment variable; its annotation determines which values are accepted."""
    return field(default=default, metadata={"name": name})


@dataclass(frozen=True, kw_only=True)
class Variables:
    """A group of environment variables. None and False stand for a variable that is not set."""

    @classmethod
    def names(cls) -> dict[str, str]:
        """The variable of each field."""
        return {each.name: each.metadata["name"] for each in fields(cls)}

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the variables. Raises UserError for a value that is not accepted. Only a text can be set and empty."""
        given = {}
        for key, (name, form) in cls._forms().items():
            text = env.get(name)
            if text is None or (not text and form is not _TEXT):
                continue
            try:
                given[key] = form.parse(text)
            except ValueError:
                raise UserError(f"{name} is '{text}', but must be {form.accepted}") from None
        return cls(**given)

    def to_env(self) -> dict[str, str]:
        """The variables that are set, as text."""
        values = {key: getattr(self, key) for key in self.names()}
        return {
            name: form.text(values[key])
            for key, (name, form) in self._forms().items()
            if values[key] is not None and values[key] is not False
        }

    @classmethod
    def _forms(cls) -> dict[str, tuple[str, _Form]]:
        return _forms_of(cls)  # type: ignore[arg-type]  # a class is hashable


@dataclass(frozen=True, kw_only=True)
class ProcessPlace(Variables):
    """The place of a process in its run. `weft join` accepts these from another machine, so none may load anything."""

    rank: int | None = variable("RANK")
    """The number of the process, as torchrun sets it."""
    world_size: int | None = variable("WORLD_SIZE")
    """The number of processes that carry workers; under torchrun, of all processes."""
    local_rank: int | None = variable("LOCAL_RANK")
    """The number of the process on its machine."""
    local_world_size: int | None = variable("LOCAL_WORLD_SIZE")
    """The number of processes on its machine."""
    workers: int | None = variable("WEFT_WORKERS")
    """The number of logical workers of the run; one for each process by default."""
    server: int | None = variable("WEFT_SERVER")
    """The number of this parameter server; a worker has none."""
    rendezvous: str | None = variable("WEFT_RENDEZVOUS")
    """HOST:PORT of the launcher's rendezvous, in a run with servers on several machines."""
    network: Network | None = variable("WEFT_NETWORK")
    """Whether the user trusts the network between the machines."""
    share_gpus: bool = variable("WEFT_SHARE_GPUS", False)
    """Whether several processes may use one GPU."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(Variables):
    """Options of `weft train`, which take precedence over those of `weft.init`. `weft join` accepts these, too."""

    job: Path | None = variable("WEFT_JOB")
    """The script of the job."""
    strategy: str | None = variable("WEFT_CLI_STRATEGY")
    """The strategy of the command line."""
    strategy_source: str | None = variable("WEFT_STRATEGY_SOURCE")
    """Where that strategy comes from, for the log."""
    steps: int | None = variable("WEFT_STEPS")
    """Optimizer steps after which the run stops."""
    seed: int | None = variable("WEFT_SEED")
    """Seed of torch, numpy, random and the data order."""
    device: str | None = variable("WEFT_DEVICE")
    """`auto`, `cpu` or `cuda`."""
    out: Path | None = variable("WEFT_OUT")
    """The run folder."""
    trace: bool = variable("WEFT_TRACE", False)
    """Whether process 0 writes a trace of its first steps."""
    resume: Path | None = variable("WEFT_RESUME")
    """The checkpoint to resume from."""
    save_every: int | None = variable("WEFT_SAVE_EVERY")
    """Steps between checkpoints; 0 for none."""
    keep_last: int | None = variable("WEFT_KEEP_LAST")
    """Number of latest checkpoints to keep."""
    keep_every: int | None = variable("WEFT_KEEP_EVERY")
    """Checkpoints at multiples of this many steps are kept for good."""


@dataclass(frozen=True, kw_only=True)
class LocalLauncher(Variables):
    """The connections of a process to the launcher on its machine."""

    pid: int | None = variable("WEFT_LAUNCHER")
    """The launcher's process id, as the process sees it."""
    failures: Path | None = variable("WEFT_WORD")
    """A folder in which the process reports why it failed."""
    progress_fd: int | None = variable("WEFT_PROGRESS_FD")
    """The pipe to which process 0 writes its progress."""
    store: str | None = variable("WEFT_STORE")
    """A file at which torch.distributed connects the processes; empty: MASTER_ADDR and MASTER_PORT."""
    server_addresses: Path | None = variable("WEFT_MEETING")
    """A folder in which servers announce their addresses."""
    key_file: Path | None = variable("WEFT_KEY_FILE")
    """The key with which workers and servers authenticate."""


@dataclass(frozen=True, kw_only=True)
class LabOptions(Variables):
    """Where a process of the lab's runs is, what the lab measures in it, and how it slows it down."""

    host: str | None = variable("WEFT_HOST")
    """The emulated host that the process enters: the cluster, the number of the host and its cores, with spaces."""
    slow: str | None = variable("WEFT_SLOW")
    """The slowdown of a straggler: 4x, or 4x@10% in a tenth of the steps."""
    sleep: Path | None = variable("WEFT_SLEEP")
    """A profile for whose durations the process sleeps instead of computing."""
    profile: Path | None = variable("WEFT_PROFILE")
    """The file to which the measured profile of the process is written."""
    peer: str | None = variable("WEFT_PEER")
    """The peer under which the job runs instead of a strategy."""
    marks: tuple[int, ...] | None = variable("WEFT_MARKS")
    """The steps at which process 0 tells the launcher that it has reached them."""


@dataclass(frozen=True, kw_only=True)
class UserSettings(Variables):
    """Settings of the user, which no launcher changes."""

    strategy: str | None = variable("WEFT_STRATEGY")
    """The strategy of a run whose command line names none."""
    path: str | None = variable("WEFT_PATH")
    """Folders with the user's own answers, laid out like the package and separated as in PATH."""
    kernels: Literal["plain"] | None = variable("WEFT_KERNELS")
    """`plain` turns kernels off."""
    fork: Literal["0", "1"] | None = variable("WEFT_FORK")
    """`0` starts every process of a run anew, instead of forking it from one that has imported torch."""
    sanitize: bool = variable("WEFT_SANITIZE", False)
    """Whether C++ kernels are built with AddressSanitizer and UBSan."""
    force: bool = variable("WEFT_FORCE", False)
    """Whether a single worker performs exchanges, too, to measure their cost."""


@dataclass(frozen=True, kw_only=True)
class Timeouts(Variables):
    """Limits of waiting for other processes, in seconds."""

    timeout_s: float = variable("WEFT_TIMEOUT_S", 600.0)
    """The wait for a live peer that does not start an exchange."""
    peer_timeout_s: float = variable("WEFT_PEER_TIMEOUT_S", 5.0)
    """The time until a peer without a sign of life is named."""


GROUPS: tuple[type[Variables], ...] = (ProcessPlace, RunOptions, LocalLauncher, LabOptions, UserSettings, Timeouts)


def check_names(env: Mapping[str, str] = os.environ) -> None:
    """Raise UserError for a variable that begins with WEFT_ and has no meaning."""
    known = [name for group in GROUPS for name in group.names().values()]
    for name in env:
        if name.startswith("WEFT_") and name not in known:
            raise UserError(f"Weft has no variable {name}, so unset it or correct it{nearest(name, known)}")


# --- text -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """The text of a value of one type, and the accepted values in words."""

    accepted: str
    parse: Callable[[str], Any]
    text: Callable[[Any], str] = str


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError
    return value


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


_TEXT = _Form("text", str)
_FORMS: dict[Any, _Form] = {
    str: _TEXT,
    Path: _Form("a path", Path),
    int: _Form("a whole number", int),
    float: _Form("a number of seconds above 0, as in 2.5", _seconds),
    bool: _Form("1 or 0", lambda text: ("0", "1").index(text) == 1, lambda value: "1" if value else "0"),
    tuple[int, ...]: _Form("whole numbers with commas between them", _whole_numbers, lambda v: ",".join(map(str, v))),
}


@functools.cache
def _forms_of(group: type[Variables]) -> dict[str, tuple[str, _Form]]:
    """The variable and the form of each field."""
    types_of = typing.get_type_hints(group)
    return {key: (name, _form(types_of[key])) for key, name in group.names().items()}


def _form(annotation: Any) -> _Form:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        (annotation,) = (each for each in typing.get_args(annotation) if each is not types.NoneType)
    if typing.get_origin(annotation) is Literal:
        choices = typing.get_args(annotation)
        return _Form(" or ".join(choices), lambda text: choices[choices.index(text)])
    return _FORMS[annotation]
