"""The systems catalogue as data: shape, vocabulary and uniqueness."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from weft.strategy import Strategy

CATALOGUE = Path(__file__).resolve().parents[2] / "src" / "weft" / "systems" / "catalogue.json"

KEYS = ["id", "aliases", "name", "group", "surveys", "status", "strategy", "note"]
GROUPS = {
    "servers",
    "averaging",
    "synchrony",
    "collectives",
    "scheduling",
    "compression",
    "partition",
    "cluster",
    "infrastructure",
    "frameworks",
    "numerics",
    "benchmarks",
}
STATUSES = {"runs", "partly", "planned", "outside"}
IDENTIFIER = re.compile(r"[a-z0-9_]+")

RUNS = {
    "baidu_ring": "bsp / ring / sequential",
    "horovod": "bsp / ring / fused(bucket=64MiB)",
    "ddp": "bsp / ring",
    "caffe2": "bsp / halving_doubling / wfbp",
    "chainermn": "bsp / ring / sequential",
    "recursive_doubling": "bsp / recursive_doubling",
    "halving_doubling": "bsp / halving_doubling",
    "bsp_a2a": "bsp / ring / sequential",
    "wfbp_a2a": "bsp / ring / wfbp",
    "mg_wfbp": "bsp / ring / mg_wfbp",
    "bytescheduler_a2a": "bsp / ring / priority(least=1B)",
    "onebit_sgd": "bsp / direct / error_feedback(onebit)",
    "terngrad": "bsp / direct / terngrad",
    "gradient_dropping": "bsp / direct / error_feedback(gradient_dropping)",
    "adacomp": "bsp / direct / error_feedback(adacomp)",
    "dgc": "bsp / direct / dgc",
    "low_rank": "bsp / direct / error_feedback(powersgd)",
    "firecaffe": "bsp / tree / sequential",
    "hogwild": "asp / shared_memory",
    "downpour": "downpour / asp / parameter_server(servers=2)",
    "terascale_tree": "bsp / tree / sequential",
    "backup_workers": "backup / parameter_server(servers=2)",
    "caffe_on_spark": "bsp / colocated / sequential",
    "bigdl": "bsp / colocated / cast / sequential",
    "ssp": "ssp / parameter_server(servers=2)",
    "cui2014": "ssp / parameter_server(servers=2)",
    "essp": "essp / parameter_server(servers=2)",
    "dynsgd": "staleness_weighted(ssp) / parameter_server(servers=2)",
    "n_softsync": "staleness_weighted(softsync(n=2)) / parameter_server(servers=2)",
    "dc_asgd": "delay_compensated(asp) / parameter_server(servers=2)",
    "implicit_momentum": "negative_momentum(asp) / parameter_server(servers=2)",
    "bsp_ps": "bsp / parameter_server(servers=0) / sequential",
    "wfbp_ps": "bsp / parameter_server(servers=0) / wfbp",
    "bytescheduler_ps": "bsp / parameter_server(servers=0) / priority(partition=4000KiB, least=1B)",
    "tictac": "bsp / parameter_server(servers=0) / priority(partition=1GiB, least=1B)",
    "p3": "bsp / parameter_server(servers=0) / priority(partition=200KB, least=1B)",
    "mxnet": "bsp / hierarchical(servers=2)",
    "cntk": "block_momentum / bsp / ring / error_feedback(onebit)",
    "sparknet": "average(every=50) / bsp / direct",
    "deeplearning4j": "average(every=5) / bsp / tree",
    "crossbow": "sma / bsp / ring",
    "bmuf": "block_momentum / bsp / ring",
    "local_sgd": "average(every=8) / bsp / ring",
    "diloco": "outer(every=500) / bsp / ring",
    "streaming_diloco": "streaming(mix=0.5) / bsp / ring / qsgd(levels=7, norm=max)",
    "mxnet_2bit": "bsp / parameter_server(servers=0) / error_feedback(twobit)",
}
BESIDE = {"p3", "diloco", "streaming_diloco"}
"""Known, but named by no survey."""


@pytest.fixture(scope="module")
def rows():
    return json.loads(CATALOGUE.read_text(encoding="utf-8"))


def test_157_rows_one_per_line(rows):
    assert isinstance(rows, list)
    assert len([row for row in rows if row["id"] not in BESIDE]) == 157
    lines = CATALOGUE.read_text(encoding="utf-8").splitlines()
    assert (lines[0], lines[-1]) == ("[", "]")
    assert [json.loads(line.rstrip(",")) for line in lines[1:-1]] == rows


def test_exact_keys_in_order(rows):
    for row in rows:
        assert list(row) == KEYS, row


def test_value_types(rows):
    for row in rows:
        for key in ("id", "name", "group", "status", "note"):
            assert isinstance(row[key], str) and row[key].strip() == row[key] != "", (row["id"], key)
        assert isinstance(row["aliases"], list), row["id"]
        assert "*" not in row["name"] + row["note"], row["id"]


def test_ids_and_aliases_are_well_formed_and_unique(rows):
    typed = [name for row in rows for name in (row["id"], *row["aliases"])]
    assert [name for name in typed if not IDENTIFIER.fullmatch(name)] == []
    assert [name for name, count in Counter(typed).items() if count > 1] == []


def test_names_are_unique(rows):
    assert len({row["name"] for row in rows}) == len(rows)


def test_groups(rows):
    assert {row["group"] for row in rows} == GROUPS


def test_statuses(rows):
    assert {row["status"] for row in rows} == STATUSES


def test_surveys(rows):
    for row in rows:
        surveys = row["surveys"]
        assert (surveys == []) == (row["id"] in BESIDE), row["id"]
        assert all(type(survey) is int and 1 <= survey <= 4 for survey in surveys), row["id"]
        assert surveys == sorted(set(surveys)), row["id"]


def test_strategy_is_null_exactly_when_nothing_runs(rows):
    for row in rows:
        assert (row["strategy"] is None) == (row["status"] in {"planned", "outside"}), row["id"]


def test_strategies_use_canonical_spelling(rows):
    for row in rows:
        if row["strategy"] is not None:
            assert str(Strategy.parse(row["strategy"]).check()) == row["strategy"], row["id"]


def test_notes(rows):
    for row in rows:
        note = row["note"]
        assert note and note.endswith("."), row["id"]
        assert len(re.findall(r"\.(?=\s|$)", note)) in (1, 2), row["id"]
        if row["status"] == "planned":
            assert re.search(r"(?:^|\. )Needs [^.]+\.$", note), row["id"]
        if row["status"] == "outside":
            assert "Outside because" in note, row["id"]


@pytest.mark.parametrize("system", sorted(RUNS))
def test_system_runs(rows, system):
    found = {row["id"]: row for row in rows}[system]
    assert found["status"] == "runs"
    assert found["strategy"] == RUNS[system]


def test_no_other_system_claims_to_run(rows):
    assert {row["id"] for row in rows if row["status"] == "runs"} == set(RUNS)
