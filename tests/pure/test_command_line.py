"""The command line in this process: options without effect, early checks, messages, `--help` and listings."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft import cli, systems
from weft.axis import AXES, catalogue
from weft.cli._explain import WORKERS, copies, held, meanings, rounds, wire_bytes
from weft.cli._forecast import time_left
from weft.cli._resume import stopped
from weft.errors import Conflict, UserError
from weft.lab.contender import Contender
from weft.lab.spec import CompareSpec
from weft.runtime.launch import supervise
from weft.runtime.launch.strategy_source import winner
from weft.runtime.launch.supervise import Terminated, passing_on_termination
from weft.runtime.record.new_folder import folder_name
from weft.strategy import Strategy

WIDTH = 80
MINUTE = "_2026-11-16_1922"
HELPS = [["train"], ["compare"], ["check"], ["answers"], ["systems"], ["export"], ["lab", "up"], ["join"], ["doctor"]]

for command in cli.COMMANDS:
    importlib.import_module(f"weft.cli.{command}")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    return tmp_path


def weft(*args: str) -> str:
    """What a command prints."""
    done = CliRunner().invoke(cli.app, list(args), prog_name="weft", catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*args: str) -> str:
    """The sentence of a command that is refused; it leaves nothing."""
    with pytest.raises(UserError) as error:
        weft(*args)
    assert "\n" not in str(error.value) and not list(Path().iterdir())
    return str(error.value)


# --- refused before anything starts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train wide --bandwidth 100mbit", "--bandwidth has no effect without emulated hosts; add --hosts"),
        ("train wide --bandwidth 1gbit", "add --hosts"),
        ("train wide --link 1=10mbit", "add --hosts"),
        ("train wide --slow 0=4x", "add --hosts"),
        ("train wide --node-rank 0", "--node-rank has no effect on one machine; add --nodes"),
        ("train wide --rendezvous 127.0.0.1:29500", "add --nodes"),
        ("train wide --network trusted", "add --nodes"),
        ("train wide --key-file key", "without parameter servers"),
        ("train wide --nodes 2 --rendezvous 127.0.0.1:29500 --key-file key", "without parameter servers"),
        ("train wide --join 1", "--join needs parameter servers and --rendezvous"),
        ("train wide --hosts 2 --rendezvous 127.0.0.1:29500", "omit one of them"),
        ("train wide --hosts 2 --network trusted", "omit one of them"),
        ("train wide --save-every 0 --keep-last 3", "--keep-last has no effect with --save-every 0"),
        ("train wide --save-every 0 --keep-every 100", "--keep-every has no effect with --save-every 0"),
        ("train wide --save-every 0 --grace 60", "--grace has no effect with --save-every 0"),
        ("train wide --device cpu --share-gpus", "--share-gpus has no effect with --device cpu"),
        ("compare wide --links loopback --bandwidth 1gbit", "--bandwidth has no effect with --links loopback"),
        ("compare wide --links loopback --link 1=10mbit", "--link has no effect with --links loopback"),
        ("compare wide --compute sleep --target-loss 1", "--target-loss has no effect with --compute sleep"),
        ("compare text --compute sleep --target-held-out 1", "--target-held-out has no effect with --compute sleep"),
        ("compare wide --profile file", "add --compute sleep"),
        ("systems horovod --group collectives", "omit the name"),
    ],
)
def test_an_option_without_effect_is_refused(line: str, says: str) -> None:
    assert says in refused(*line.split())


@pytest.mark.parametrize("line", ["train wide --nodes 1 --node-rank 0 --rendezvous 127.0.0.1:29500 --device gpu"])
def test_a_batch_script_may_name_one_machine(line: str) -> None:
    assert "--device" in refused(*line.split())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train wide --device gpu", "--device is 'gpu', but must be auto, cpu or cuda"),
        ("train wide --json nowhere/file.json", "--json nowhere/file.json cannot be written: No such file"),
        ("train wide --json /", "--json / cannot be written: Is a directory; give another file, or -"),
        ("train wide --out /proc/run", "cannot be written: No such file or directory; give another with --out"),
        ("train wide --resume nowhere", "--resume nowhere does not exist; give a run folder"),
        ("train wide --system easgd", "is planned, but does not run yet; see `weft systems easgd`"),
        ("train wide --grace -1", "--grace is -1, but must not be negative"),
        ("compare wide --compute sleep --profile nowhere", "nowhere cannot be read: No such file or directory; give"),
        ("compare wide --steps 9", "--steps is 9, but the first 5 steps are warm-up and at least 5 are measured"),
        ("compare wide --seeds 0", "--seeds is 0"),
        ("compare text --target-held-out 0 -- --eval-every 5", "--target-held-out is 0, but must be a loss above 0"),
        ("compare text --target-held-out nan -- --eval-every 5", "--target-held-out is nan, but must be"),
        ("compare text --target-held-out inf -- --eval-every 5", "--target-held-out is inf, but must be"),
        ("compare text --target-held-out 2.5", "text does not; log it with run.log(held_out_loss=...) in the loop, or"),
        ("compare wide --target-held-out 2.5 -- --eval-every 5", "wide does not;"),
        ("compare wide --json nowhere/file.json", "give another file, or -"),
        ("check horovod", "'horovod' is a system, not a strategy; see `weft systems horovod`, or pass --system"),
        ("check horovd", "there is no answer 'horovd'; did you mean the system 'horovod'?"),
        ("check zzzqq", "there is no answer 'zzzqq'; see `weft answers`"),
        ("systems zzzqq", "there is no system 'zzzqq'; see `weft systems`"),
        ("answers zzzqq", "nor an answer; see `weft answers`"),
        ("check ddp", "or pass --system ddp (to `weft compare` also --peers ddp)"),
        ("check ddp-tuned", "pass --peers ddp-tuned to `weft compare`"),
        ("train wide --strategy horovod", "--system horovod"),
        ("compare wide horovod", "--system horovod"),
        ("answers compresion", "did you mean 'compression'"),
    ],
)
def test_bad_input_is_refused_at_once(line: str, says: str) -> None:
    said = refused(*line.split())
    assert says in said and len(said) < 200


@pytest.mark.parametrize("text", ["bsp ring", "bsp, ring"])
def test_answers_without_a_separator_are_told_of_it(text: str) -> None:
    assert "separate answers by ' / ', as in 'bsp / ring'" in refused("check", text)


def test_a_json_file_that_is_there_keeps_its_content_when_a_command_is_refused(place: Path) -> None:
    (place / "file").write_text("before")
    with pytest.raises(UserError):
        weft("train", "nowhere.py", "--json", "file")
    assert (place / "file").read_text() == "before"


def test_a_comparison_in_python_needs_measured_steps() -> None:
    contender = Contender(name="bsp / ring", strategy=Strategy.parse("bsp / ring"))
    with pytest.raises(UserError, match="give 10 or more"):
        CompareSpec(job="wide", contenders=(contender,), steps=9).checked()
    assert CompareSpec(job="wide", contenders=(contender,), steps=10).checked().steps == 10


# --- names and messages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "strategy", "name"),
    [
        ("wide", "bsp / direct", f"wide_bsp-direct{MINUTE}"),
        ("compare-wide", "", f"compare-wide{MINUTE}"),
        ("my job", "bsp / ring / fused(bucket=64MiB)", f"my-job_bsp-ring-fused-bucket-64MiB{MINUTE}"),
        ("a", "bsp / direct / error_feedback(topk(ratio=0.01))", f"a_bsp-direct-error_feedback-topk-ratio{MINUTE}"),
    ],
)
def test_a_folder_has_a_readable_name(job: str, strategy: str, name: str) -> None:
    assert folder_name(job, time.strptime("2026-11-16 19:22", "%Y-%m-%d %H:%M"), strategy) == name


def test_a_name_is_short_for_any_strategy() -> None:
    names = [folder_name("x" * 200, time.localtime(), str(each)) for each in composed()]
    assert all(re.fullmatch(r"[\w.-]{1,100}", name) for name in names)


def test_what_was_saved_is_told(place: Path) -> None:
    late = Terminated("it was not saved within 3 s; allow more with --grace", signal.SIGTERM)
    saved = Terminated("", signal.SIGINT, saved=True)
    assert stopped(Path("run"), saved) == "stopped; nothing was saved" == stopped(Path("run"), late)
    (place / "run/checkpoints/step-00000182").mkdir(parents=True)
    where, resume = "run/checkpoints/step-00000182", "resume with `weft train --resume run`"
    assert stopped(Path("run"), saved) == f"stopped at step 182; saved in {where}; {resume}"
    assert stopped(Path("run"), late) == f"stopped; {late}; step 182 is saved in {where}; {resume}"


def test_a_second_signal_ends_a_run_unless_it_follows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with passing_on_termination([], 30.0) as requested:
        assert not requested
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):  # `timeout` sends one twice
            os.kill(os.getpid(), number)
        assert requested == [signal.SIGINT]
        monkeypatch.setattr(supervise, "_SAME_S", 0.0)
        with pytest.raises(Terminated, match="a second SIGINT") as error:
            os.kill(os.getpid(), signal.SIGINT)
    assert error.value.number == signal.SIGINT
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == usual


def test_the_source_of_a_strategy_is_that_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CLI_STRATEGY", "bsp / ring")
    assert winner(None)[0] == "the command line"
    monkeypatch.setenv("WEFT_STRATEGY_SOURCE", "the system ddp")
    assert winner(None)[0] == "the system ddp"


def test_what_a_system_lacks_is_one_sentence() -> None:
    partly = [each for each in systems.catalogue() if each.status == "partly"]
    for each in partly:
        assert re.fullmatch(r"[A-Z].*\.", each.missing) and each.note.endswith(each.missing), each.id
    assert "weft.numerics.Lars" in systems.find("lars").missing
    assert "weft.numerics.LinearScaling" in systems.find("linear_scaling").missing
    assert systems.find("petuum").missing == "Its scheduler of model blocks, STRADS, is missing."


HOOKED = """
from weft.errors import UserError
from weft.runtime.launch.user_errors import show_user_errors_briefly
show_user_errors_briefly()
show_user_errors_briefly()
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [("UserError('one sentence')", 2, "weft: one sentence\n"), ("ValueError('x')", 1, "Traceback")],
)
def test_an_error_of_the_user_is_one_sentence_without_a_launcher(error: str, status: int, says: str) -> None:
    code = HOOKED.format(error=error)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status and done.stderr.startswith(says), done.stderr


# --- explained ------------------------------------------------------------------------------------------------------


@functools.cache
def composed() -> list[Strategy]:
    """Valid strategies: each answer of the catalogue beside several topologies and synchronies."""
    frames = ["bsp / ring", "bsp / direct", "bsp / parameter_server(servers=2)", "asp / parameter_server"]
    frames += ["bsp / hierarchical", "asp / shared_memory", "downpour(push=4, fetch=2) / asp / parameter_server"]
    found = {str(strategy): strategy for strategy in map(Strategy.parse, frames)}
    for base in list(found.values()):
        for question, name in [(axis, name) for axis in AXES for name in catalogue(axis)]:
            try:
                strategy = dataclasses.replace(base, **{question: getattr(Strategy.parse(name), question)}).check()
            except UserError:  # it needs a parameter, or cannot be combined
                continue
            found[str(strategy)] = strategy
    return list(found.values())


def test_every_strategy_has_meanings_and_costs() -> None:
    strategies = composed()
    assert len(strategies) > 60
    for strategy in strategies:
        words = meanings(strategy)
        assert list(words) == list(AXES) and all(text.endswith(".") for text in words.values()), strategy
        for workers in WORKERS:
            sends = not strategy.shares_memory
            assert (rounds(strategy, workers) > 0) == sends, strategy
            assert copies(strategy) >= 1 and held(strategy).endswith("."), strategy
            assert (wire_bytes(strategy, workers) > 0) == sends or workers == 2, strategy  # groups of one send nothing


@pytest.mark.parametrize(
    ("text", "workers", "count", "sent"),
    [
        ("bsp / ring", 4, 6, 2 * 3 / 4 * 100e6),
        ("bsp / ring / cast", 4, 6, 2 * 3 / 4 * 50e6),
        ("bsp / direct", 8, 2, 2 * 7 / 8 * 100e6),
        ("bsp / parameter_server(servers=2)", 8, 2, 100e6),
        ("bsp / hierarchical", 8, 4, 100e6),
        ("downpour(push=4, fetch=2) / asp / parameter_server", 8, 2, 25e6),
        ("asp / shared_memory", 8, 0, 0),
    ],
)
def test_rounds_and_bytes(text: str, workers: int, count: int, sent: float) -> None:
    strategy = Strategy.parse(text)
    assert (rounds(strategy, workers), wire_bytes(strategy, workers)) == (count, pytest.approx(sent))


def test_with_servers_no_worker_steps_the_optimizer() -> None:
    for text in ("ssp(slack=4) / parameter_server(servers=2)", "bsp / parameter_server", "asp / hierarchical"):
        words = meanings(Strategy.parse(text))
        assert "The servers keep the model" in words["partition"], text
        assert words["optimization"].startswith("The servers step the optimizer, with "), text
    assert "the mean gradient of all workers" in meanings(Strategy.parse("bsp / parameter_server"))["optimization"]
    assert "each worker on arrival" in meanings(Strategy.parse("asp / parameter_server"))["optimization"]
    assert "each group on arrival" in meanings(Strategy.parse("asp / hierarchical"))["optimization"]
    assert "in time" in meanings(Strategy.parse("backup / parameter_server"))["optimization"]
    assert "trains a copy" in meanings(Strategy.parse("downpour / asp / parameter_server"))["partition"]


@pytest.mark.parametrize(
    ("text", "count", "says"),
    [
        ("bsp / direct", 1, "A worker holds 1 copy of the model."),
        ("bsp / ring / priority", 1, "1 copy of the model."),
        ("asp / shared_memory", 1, "All workers hold 1 copy of the model together."),
        ("asp / parameter_server", 1, "A worker holds 1 copy"),
        ("bsp / parameter_server", 2, "2 copies of the model: the present one, and the values that arrive meanwhile."),
        ("bsp / parameter_server / sequential", 1, "A worker holds 1 copy"),
        ("essp / parameter_server", 2, "the values that arrive meanwhile"),
        ("downpour(push=4, fetch=2) / asp / parameter_server", 3, "accumulated gradients; one more while these"),
        ("average / bsp / direct", 3, "3 copies of the model: its own, the anchor, a difference."),
        ("outer / bsp / ring", 4, "4 copies of the model: its own, the anchor, a difference and the state of merges."),
        ("outer(momentum=0) / bsp / ring", 3, "a difference."),
    ],
)
def test_check_shows_how_many_copies_of_the_model_a_worker_holds(text: str, count: int, says: str) -> None:
    assert says in " ".join(weft("check", text).split())
    weft("check", text, "--json", "file")
    assert json.loads(Path("file").read_text())["copies"] == count


def test_check_breaks_no_word_at_80_columns() -> None:
    said = weft("check", "ssp(slack=4) / parameter_server(servers=2) / error_feedback(topk(ratio=0.01))")
    assert max(len(line.rstrip()) for line in said.splitlines()) <= WIDTH
    assert {"parameter_server(servers=2)", "error_feedback(topk(ratio=0.01))"} <= set(said.split())


def test_check_shows_rounds_and_bytes() -> None:
    said = weft("check", "bsp / ring")
    assert "25 M float32 parameters" in said and re.search(r"(?m)^4 +6 +150\.0 MB *$", said)
    weft("check", "bsp / ring", "--json", "file")
    result = json.loads(Path("file").read_text())
    assert result["rounds"]["4"] == 6 and result["wire_bytes"]["4"] == pytest.approx(150e6)
    with pytest.raises(Conflict):
        weft("check", "asp / ring")


# --- shown at 80 columns --------------------------------------------------------------------------------------------


def test_the_overview_is_whole_at_80_columns() -> None:
    said = weft("--help").partition("\n")[2]
    assert max(map(len, said.splitlines())) <= WIDTH and "..." not in said
    for name in (*cli.COMMANDS, "key"):
        assert re.search(rf"(?m)^  {name} +[A-Z].*\.$", said), name
    for line in cli.EXAMPLES.splitlines():
        assert line.strip() in said
    assert "Without --strategy" in said and cli.EXAMPLES in weft()
    assert max(map(len, weft().splitlines())) <= WIDTH


@pytest.mark.parametrize("names", HELPS, ids=" ".join)
def test_the_help_of_a_command_fits(names: list[str]) -> None:
    assert max(map(len, weft(*names, "--help").splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("name", "headings"),
    [
        ("train", ["Job and strategy", "Processes and machines", "Emulated cluster", "Checkpoints", "Output"]),
        ("compare", ["Strategies and peers", "Emulated cluster", "Measurement", "Output"]),
    ],
)
def test_options_are_in_groups(name: str, headings: list[str]) -> None:
    said = weft(name, "--help")
    found = re.findall(r"(?m)^([A-Z][\w ]+):$", said)
    assert sorted(found) == sorted(["Arguments", *headings, "Options"])
    cluster = said.split("Emulated cluster:")[1].split("\n\n")[0]
    assert all(option in cluster for option in ("--hosts", "--bandwidth", "--link", "--slow"))
    options = re.findall(r"(?m)^  (?:-\w, )?(--[\w-]+)", said.split("Options:")[1])
    assert options == ["--help"]


def test_answers_stand_with_their_parameters_at_80_columns() -> None:
    said = weft("answers")
    assert max(map(len, said.splitlines())) <= WIDTH
    for axis in AXES:
        for name, kind in catalogue(axis).items():
            assert re.search(rf"(?m)^  {name}( \*)?( |$)", said), name
            for field in (each.name for each in dataclasses.fields(kind)):
                part = re.search(rf"(?ms)^  {name}\b.*?(?=^  \w|^\w)", said)
                assert part is not None and re.search(rf"(?m)^    {field}\b", part[0]), (name, field)


def test_one_answer_or_one_question_is_shown() -> None:
    one, question = weft("answers", "topk"), weft("answers", "partition")
    assert "  topk" in one and "    ratio" in one and "onebit" not in one
    assert "replicated" in question and "topk" not in question


def test_systems_are_listed_without_a_broken_strategy() -> None:
    said = weft("systems")
    assert max(map(len, said.splitlines())) <= WIDTH
    words = set(said.split())
    for each in systems.catalogue():
        assert each.id in words and set((each.strategy or "").split()) <= words, each.id
    assert "160 systems (157 of the surveys, and diloco, streaming_diloco, p3): " in said


# --- the forecast of a comparison -----------------------------------------------------------------------------------


def test_a_forecast_follows_the_measured_times() -> None:
    predicted = {"alone": 2.0, "ring": 4.0, "slow": 8.0}
    runs = dict.fromkeys(predicted, 2)
    assert time_left(predicted, {}, runs, "", 0.0) == 28
    assert time_left(predicted, {"alone": [6.0]}, runs, "", 0.0) == 6 + 2 * 12 + 2 * 24
    assert time_left(predicted, {"alone": [6.0]}, runs, "ring", 5.0) == 6 + 2 * 12 + 2 * 24 - 5
    done = {"alone": [6.0, 6.0], "ring": [12.0, 12.0], "slow": [10.0]}
    assert time_left(predicted, done, runs, "slow", 3.0) == 7
    assert time_left(predicted, done, runs, "slow", 30.0) == 0, "a run that is late takes nothing from the others"
    assert time_left(predicted, done, runs | {"slow": 0}, "", 0.0) == 0, "a contender that failed does not run again"
