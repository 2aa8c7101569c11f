"""A way of distributing training is one value: `Strategy.parse("bsp / ring / error_feedback(topk) / wfbp")`.

It holds one answer to each of the six questions, round-trips through its spelling and through TOML, and is legal or
refused with a remedy before anything starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.axis import AXES, DEFAULTS, Answer, Raw, catalogue, find, make, parse_raw
from weft.compression import Compressor
from weft.errors import Conflict, SpellingError, UserError, nearest
from weft.ops import Spec
from weft.optimization import LocalSteps, ModelMerging, Optimization
from weft.partition import Partition
from weft.schedule import Schedule
from weft.synchrony import Synchrony
from weft.topology import CollectiveTopology, MemoryTopology, ServerTopology, Topology


def default(axis: str) -> Any:
    """The constant default of one axis."""
    return make(catalogue(axis)[DEFAULTS[axis]], {})


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One answer per question."""

    partition: Partition = dataclasses.field(default_factory=lambda: default("partition"))
    """Where the model lives."""
    optimization: Optimization = dataclasses.field(default_factory=lambda: default("optimization"))
    """Whose optimizer steps, and what is merged."""
    synchrony: Synchrony = dataclasses.field(default_factory=lambda: default("synchrony"))
    """When a worker may start its next step."""
    topology: Topology = dataclasses.field(default_factory=lambda: default("topology"))
    """Who talks to whom."""
    compression: Compressor = dataclasses.field(default_factory=lambda: default("compression"))
    """What goes on the wire."""
    schedule: Schedule = dataclasses.field(default_factory=lambda: default("schedule"))
    """In which order it leaves."""

    @classmethod
    def of(cls, *answers: Answer) -> Strategy:
        """The strategy with these answers, at most one per axis, and defaults elsewhere."""
        chosen: dict[str, Any] = {}
        for answer in answers:
            if answer.axis in chosen:
                raise SpellingError(
                    f"'{chosen[answer.axis]}' and '{answer}' both answer {answer.axis}; keep one of them"
                )
            chosen[answer.axis] = answer
        return cls(**chosen)

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read the canonical spelling, or `@file.toml`. Answers may stand in any order."""
        if text.startswith("@"):
            return cls.from_toml(_read(Path(text[1:])))
        raws = [parse_raw(part) for part in text.split("/")]
        return cls.of(*(raw.build(find(raw.name)) for raw in raws))

    @classmethod
    def from_toml(cls, text: str) -> Strategy:
        """Read TOML: one key per axis, a spelling or a table with `name`; or one key `strategy` that holds either."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SpellingError(f"the strategy file is not TOML: {error}") from None
        return cls.from_table(table.get("strategy", table))

    @classmethod
    def from_table(cls, table: Any) -> Strategy:
        """A strategy from parsed TOML or JSON: a spelling, or a table of answers by axis."""
        if isinstance(table, str):
            return cls.parse(table)
        if not isinstance(table, dict):
            raise SpellingError("a strategy in a file is a text or a table with one entry per question")
        answers = []
        for axis, value in table.items():
            if axis not in AXES:
                raise SpellingError(f"'{axis}' is not one of the six questions{nearest(axis, AXES)}")
            raw = parse_raw(value) if isinstance(value, str) else _raw_table(value, axis)
            known = catalogue(axis)
            if raw.name not in known:
                raise SpellingError(f"{axis} has no answer '{raw.name}'{nearest(raw.name, known)}")
            answers.append(raw.build(known[raw.name]))
        return cls.of(*answers)

    def __str__(self) -> str:
        shown = []
        for axis, answer in self.answers():
            if axis in ("synchrony", "topology") or str(answer) != DEFAULTS[axis]:
                shown.append(str(answer))
        return " / ".join(shown)

    def answers(self) -> Iterator[tuple[str, Answer]]:
        """The six answers in the order of the questions."""
        for axis in AXES:
            yield axis, getattr(self, axis)

    def spelled_out(self) -> dict[str, Any]:
        """Every answer with every parameter, for files."""
        return {axis: answer.spelled_out() for axis, answer in self.answers()}

    def to_toml(self) -> str:
        """Everything written out; `Strategy.from_toml(s.to_toml()) == s`."""
        lines: list[str] = []
        for axis, table in self.spelled_out().items():
            _toml_table(axis, table, lines)
        return "\n".join(lines).strip() + "\n"

    @property
    def digest(self) -> str:
        """Eight hex digits of the spelling's hash, for file names."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:8]

    @property
    def has_servers(self) -> bool:
        """Whether parameter servers keep the model."""
        return isinstance(self.topology, ServerTopology)

    @property
    def server_topology(self) -> ServerTopology:
        """The topology of a strategy that has servers."""
        assert isinstance(self.topology, ServerTopology), f"{self.topology} has no servers"
        return self.topology

    def server_hosts(self, workers: int) -> tuple[int, ...]:
        """The host of each server, as `ServerTopology.server_hosts` numbers them; () where there are no servers."""
        return self.server_topology.server_hosts(workers) if self.has_servers else ()

    def push_bytes(self, specs: Sequence[Spec]) -> int:
        """Bytes of one worker's pushes: with servers a parameter is compressed by itself, as by a worker alone."""
        rounds = (self.compression.rounds([spec.real()], 1) for spec in specs)
        return sum(each.nbytes for group in rounds for each in group)

    def wire_bytes(self, specs: Sequence[Spec], workers: int) -> float:
        """Bytes that the busiest worker sends in one exchange of these gradients."""
        if isinstance(self.topology, ServerTopology):
            return self.topology.wire_bytes(self.push_bytes(specs), workers)
        if not isinstance(self.topology, CollectiveTopology):
            return 0.0
        rounds = self.compression.rounds(specs, workers)
        return sum(self.topology.wire_bytes(each.op, each.nbytes, workers) for each in rounds)

    @property
    def has_local_steps(self) -> bool:
        """Whether workers step copies of the model by themselves."""
        return isinstance(self.optimization, LocalSteps)

    @property
    def merges_models(self) -> bool:
        """Whether every worker has an optimizer of its own, and models are merged."""
        return isinstance(self.optimization, ModelMerging)

    @property
    def shares_memory(self) -> bool:
        """Whether all workers train one model in memory that they share."""
        return isinstance(self.topology, MemoryTopology)

    @property
    def survives_worker_loss(self) -> bool:
        """Whether the other workers continue when one is lost."""
        return self.has_servers and not self.server_topology.worker_groups(1) and not self.synchrony.lockstep

    def check(self) -> Strategy:
        """Itself where legal; else the first conflict is raised, with its remedy."""
        for conflict in conflicts(self):
            raise conflict
        return self


def conflicts(strategy: Strategy) -> Iterator[Conflict]:
    """Every reason why a strategy cannot run. All rules of legality are here; the planner uses the same."""
    synchrony, topology, compression = strategy.synchrony, strategy.topology, strategy.compression
    if str(strategy.partition) != DEFAULTS["partition"]:
        yield Conflict(
            str(strategy.partition),
            str(topology),
            why="every worker still holds the whole model",
            instead=f"'{DEFAULTS['partition']} / {synchrony} / {topology}'",
        )
    if strategy.has_local_steps:
        yield from _accruing(strategy)
    if strategy.merges_models:
        yield from _merging(strategy)
    if isinstance(topology, CollectiveTopology) and not synchrony.lockstep:
        yield Conflict(
            str(synchrony),
            str(topology),
            why=f"{topology.name} needs every worker in every step, and {synchrony.name} does not wait for all of them",
            instead=f"'bsp / {topology}', or '{synchrony} / parameter_server'",
        )
    if strategy.shares_memory:
        yield from _sharing_memory(strategy)
    if strategy.has_servers:
        yield from _with_servers(strategy)
    for outer, inner in nested(compression):
        if outer.tracks_residual and any(layer.tracks_residual for layer in wrapped(inner)):
            yield Conflict(
                str(outer),
                str(inner),
                why=f"{outer.name} around {inner.name} keeps the same residual twice",
                instead=f"'{inner}'",
            )
        if inner.claims:
            yield Conflict(
                str(outer),
                str(inner),
                why=f"{inner.name} takes over the {inner.claims[0]} of all parameters, {outer.name} passes some",
                instead=f"'{inner}' alone",
            )
        if outer.tracks_residual and inner.lossless:
            yield Conflict(
                str(outer),
                str(inner),
                why=f"{inner.name} sends everything, so there is no residual",
                instead=f"'{inner}' alone, or error_feedback(topk)",
            )
        if outer.tracks_residual and not inner.approximates:
            yield Conflict(
                str(outer),
                str(inner),
                why=f"{inner} does not approximate the gradient, so the rest is no residual",
                instead=f"'{inner}' alone, or error_feedback(topk), or error_feedback(sign(scaled=true))",
            )


def _accruing(strategy: Strategy) -> Iterator[Conflict]:
    """Conflicts of local steps, which need servers and report no progress between two exchanges."""
    optimization, synchrony, topology = strategy.optimization, strategy.synchrony, strategy.topology
    served = topology if strategy.has_servers else "parameter_server"
    if served is not topology:
        yield Conflict(
            str(optimization),
            str(topology),
            why=f"{optimization.name} exchanges with servers that keep the model, and {topology.name} has none",
            instead=f"'{optimization} / asp / {served}'",
        )
    if synchrony.waits:
        yield Conflict(
            str(optimization),
            str(synchrony),
            why=f"{synchrony.name} compares the steps of all workers, which report none between two exchanges",
            instead=f"'{optimization} / asp / {served}'",
        )
    elif synchrony.looks_back and optimization.period > 1:
        yield Conflict(
            str(optimization),
            str(synchrony),
            why=f"{synchrony.name} corrects gradients of the model last read, not sums over several local steps",
            instead=f"'{optimization.name} / {synchrony} / {served}', or '{optimization} / asp / {served}'",
        )


def _merging(strategy: Strategy) -> Iterator[Conflict]:
    """Conflicts of local optimizers, whose models are merged by a collective with all workers."""
    optimization, synchrony, topology = strategy.optimization, strategy.synchrony, strategy.topology
    compression, schedule = strategy.compression, strategy.schedule
    one, usual = str(optimization), f"'{optimization} / {synchrony} / {topology}'"
    if not isinstance(topology, CollectiveTopology):
        why = f"{optimization.name} merges the workers' models by a collective, and {topology.name} has none"
        yield Conflict(one, str(topology), why=why, instead=f"'{optimization} / bsp / direct'")
    elif not synchrony.lockstep:
        why = f"a merge needs all workers, and {synchrony.name} does not wait for all of them"
        yield Conflict(one, str(synchrony), why=why, instead=f"'{optimization} / bsp / {topology}'")
    if str(schedule) != DEFAULTS["schedule"]:
        why = f"{schedule.name} orders the gradients of a step, and models are merged between steps"
        yield Conflict(one, str(schedule), why=why, instead=usual)
    if compression.claims:
        why = f"{compression.name} takes over the {compression.claims[0]} of an optimizer, and each worker has one"
        yield Conflict(one, str(compression), why=why, instead=f"{usual[:-1]} / int8'")
    factors = next((layer for layer in wrapped(compression) if layer.factors), None)
    if factors is not None:
        why = f"{factors.name} sends factors of gradients, and differences of models have none"
        yield Conflict(one, str(compression), why=why, instead=f"{usual[:-1]} / int8'")


def _sharing_memory(strategy: Strategy) -> Iterator[Conflict]:
    """Conflicts of shared memory, where nothing is exchanged, waited for, compressed or ordered."""
    for answer, instead in ((strategy.synchrony, "asp"), (strategy.compression, "dense"), (strategy.schedule, "fused")):
        if str(answer) != instead:
            yield Conflict(
                str(answer),
                str(strategy.topology),
                why="workers write into one model and exchange nothing",
                instead="'asp / shared_memory'",
            )


def _with_servers(strategy: Strategy) -> Iterator[Conflict]:
    """Conflicts of parameter servers."""
    topology, compression, schedule = strategy.server_topology, strategy.compression, strategy.schedule
    if not schedule.by_key:
        yield Conflict(
            str(schedule),
            str(topology),
            why=f"{schedule.name} merges buckets by all-reduce times, and servers exchange each parameter by itself",
            instead=f"'{strategy.synchrony} / {topology} / priority'",
        )
    if topology.worker_groups(1):
        yield from _with_aggregators(strategy)
    if compression.claims:
        yield Conflict(
            str(compression),
            str(topology),
            why=f"{compression.name} takes over the {compression.claims[0]} of the optimizer, which the servers step",
            instead="error_feedback(topk)",
        )
    if any(layer.factors for layer in wrapped(compression)):
        yield Conflict(
            str(compression),
            str(topology),
            why=f"{compression.name} sends factors of gradients, which servers do not decode yet",
            instead="dense",
        )


def _with_aggregators(strategy: Strategy) -> Iterator[Conflict]:
    """Conflicts of aggregators, which sum the pushes of a group in each step and distribute the reply."""
    topology, synchrony, compression = strategy.topology, strategy.synchrony, strategy.compression
    if not compression.raw:
        yield Conflict(
            str(compression),
            str(topology),
            why="an aggregator forwards sums of pushes, which compressors do not decode yet",
            instead=f"'{synchrony} / {topology}', or parameter_server with {compression}",
        )
    if synchrony.eager:
        yield Conflict(
            str(synchrony),
            str(topology),
            why="the workers of a group take each step together and wait for its reply",
            instead=f"'ssp / {topology}', or '{synchrony} / parameter_server'",
        )
    if strategy.has_local_steps:
        yield Conflict(
            str(strategy.optimization),
            str(topology),
            why="the workers of a group take each step together, without local steps",
            instead=f"'{synchrony} / {topology}', or '{strategy.optimization} / {synchrony} / parameter_server'",
        )


def wrapped(compression: Compressor) -> Iterator[Compressor]:
    """A compressor and, outside in, what it wraps."""
    yield compression
    yield from (inner for _, inner in nested(compression))


def nested(outer: Compressor) -> Iterator[tuple[Compressor, Compressor]]:
    """Each wrapper with what it wraps, outside in."""
    for field in dataclasses.fields(outer):
        inner = getattr(outer, field.name)
        if isinstance(inner, Compressor):
            yield outer, inner
            yield from nested(inner)


def _raw_table(value: Any, axis: str) -> Raw:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise SpellingError(f"{axis} in a file is a text such as '{DEFAULTS[axis]}' or a table with a name")
    return Raw(value["name"], {k: v for k, v in value.items() if k != "name"})


def _toml_table(path: str, table: dict[str, Any], lines: list[str]) -> None:
    lines.append(f"\n[{path}]")
    nested = {k: v for k, v in table.items() if isinstance(v, dict)}
    for key, value in table.items():
        if key not in nested:
            lines.append(f"{key} = {_toml_value(value)}")
    for key, value in nested.items():
        _toml_table(f"{path}.{key}", value, lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"the strategy file {path} cannot be read: {reason}; give the path of a TOML file") from None
