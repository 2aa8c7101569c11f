"""Comparisons as a user makes them: `weft compare` and `weft train --hosts` on an emulated cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.pure.test_json_keys import COMPARISON, MACHINE, ROW
from weft.errors import JobError
from weft.lab import peers, trial
from weft.lab.cluster import Cluster
from weft.lab.contender import Contender, Task
from weft.profile import Profile
from weft.runtime.record import run_folder
from weft.strategy import Strategy

WEFT = [sys.executable, "-m", "weft.cli"]
FRAME = 1514 / 1448


def call(*args: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*WEFT, *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def compared(place: Path) -> dict[str, Any]:
    strategies = ["bsp / ring", "bsp / direct / error_feedback(topk(ratio=0.01))"]
    options = ["--peers", "ddp", "--hosts", 2, "--bandwidth", "200mbit", "--steps", 10, "--seeds", 1]
    options += ["--target-loss", 4.5, "--out", "out", "--json", "result.json"]
    done = call("compare", "wide", *strategies, *options, "--", "--size", "1m", cwd=place)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads((place / "result.json").read_text())
    assert "expected: about" in done.stdout and "report: " in done.stdout
    assert done.stdout.endswith(f"\n{result['headline']}\n")
    return result


def test_keys(compared: dict[str, Any], place: Path) -> None:
    assert list(compared) == COMPARISON and list(compared["machine"]) == MACHINE
    assert [list(row) for row in compared["rows"]] == [ROW] * 3
    assert list(compared["one_host"]) == ["step_s", "step_s_spread", "samples_per_s"]
    assert json.loads((place / "out/compare.json").read_text()) == compared
    files = {file.name for file in (place / "out").iterdir()}
    assert files >= {"report.html", "step.png", "loss.png", "timeline.png"}


def test_rows_tell_the_truth_about_the_wire(compared: dict[str, Any]) -> None:
    """What the links carried is what each row declares, plus headers."""
    ring, sparse, ddp = compared["rows"]
    size = 4 * sum(spec.numel for spec in run_folder.model(Path(compared["folder"]) / "one-host"))
    assert ring["wire_bytes_worker"] == ddp["wire_bytes_worker"] == size
    for row in (ring, ddp):
        assert row["wire_bytes_link"] == pytest.approx(row["wire_bytes_worker"] * FRAME, rel=0.02)
    assert sparse["wire_bytes_worker"] == pytest.approx(2 * 0.01 * size, rel=0.02)
    assert [row["learning"] for row in (ring, sparse, ddp)] == [1.0, 1.681, 1.0]


def test_rows_hang_together(compared: dict[str, Any]) -> None:
    for row in compared["rows"]:
        assert row["error"] is None and row["compute"] == "real"
        assert row["exposed_s"] == pytest.approx(max(0.0, row["step_s"] - row["compute_s"]))
        if row["bound_s"] is not None:
            assert row["bound_share"] == pytest.approx(row["bound_s"] / row["step_s"]) and row["bound_share"] <= 1
        assert row["samples_per_s"] == pytest.approx(64 / row["step_s"])
    ring, _, ddp = compared["rows"]
    assert ring["final_loss"] == pytest.approx(ddp["final_loss"], abs=1e-4)
    assert set(compared["timelines"]["bsp / ring"]) == {"loop", "wire"}
    assert len(compared["curves"]["ddp"]["loss"]) == 10


def test_a_contender_that_fails_is_a_row_with_its_error(tmp_path: Path) -> None:
    """A strategy that diverges is no failure; a peer that cannot run here is, and the others go on."""
    job = tmp_path / "tied.py"
    job.write_text(TIED)
    result = weft.compare(
        str(job), "bsp / ring", peers=["fsdp"], hosts=2, bandwidth="1gbit", steps=10, seeds=1, out=tmp_path / "out"
    )
    ring, fsdp = result.rows
    assert ring["error"] is None and ring["step_s"] > 0
    assert fsdp["step_s"] is None and "process" in fsdp["error"]
    assert result.report is not None and fsdp["error"][:20] in result.report.read_text()
    assert "svg" in result._repr_html_()


TIED = """
import torch, weft
from torch import nn
run = weft.init(steps=8)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.distribute(model, optimizer)
for x in run.shard([torch.ones(4, 8)] * 100):
    loss = model(x).square().mean() + 0 * sum(p.view(-1)[0] for p in model.parameters())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=loss)
"""
"""Looks into its parameters, which are somewhere else under FSDP."""


def test_sleeping_compute_sends_what_real_compute_sends(tmp_path: Path, compared: dict[str, Any]) -> None:
    result = weft.compare(
        *("wide", "bsp / ring"), peers=["ddp", "fsdp"], hosts=2, bandwidth="200mbit", compute="sleep", steps=10,
        seeds=1, args=("--size", "1m"), out=tmp_path / "out",
    )  # fmt: skip
    ring, ddp, fsdp = result.rows
    assert ring["compute"] == "sleep" and ring["final_loss"] is None
    assert ring["wire_bytes_worker"] == ddp["wire_bytes_worker"] == compared["rows"][0]["wire_bytes_worker"]
    assert ring["wire_bytes_link"] == pytest.approx(ring["wire_bytes_worker"] * FRAME, rel=0.02)
    assert "--compute real" in fsdp["error"]
    assert {name for name, _ in Profile.read(tmp_path / "out/profile.json").backward} == {
        spec.name for spec in run_folder.model(tmp_path / "out/one-host")
    }


def test_the_time_to_a_held_out_loss(tmp_path: Path) -> None:
    """With lockstep and without; the figures of merges stand in the row of the local optimizer alone."""
    strategies = ["bsp / direct", "average(every=5) / bsp / direct", "asp / parameter_server"]
    options = ["--hosts", 2, "--bandwidth", "200mbit", "--steps", 20, "--seeds", 1, "--target-held-out", 4.7]
    line = [*strategies, *options, "--out", "out", "--json", "result.json", "--", "--size", "tiny", "--eval-every", 5]
    done = call("compare", "text", *line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert result["target_held_out"] == 4.7 and "--target-held-out 4.7" in result["command"]
    for number, row in enumerate(result["rows"], start=1):
        assert row["error"] is None and row["held_out_loss"] < 4.7 and row["time_to_held_out_s"] > 0
        found = run_folder.events(tmp_path / f"out/{number:02d}-seed0")
        evaluated = sum(event.get("eval_s") or 0 for event in found)
        assert row["time_to_held_out_s"] < found[-1]["time_s"] - evaluated
    direct, average, _ = result["rows"]
    assert (average["merges"], direct["merges"]) == (4, None) and average["merge_s"] > 0 < average["consensus"]
    assert "to held-out s" in done.stdout
    assert "time to held‑out loss 4.7" in (tmp_path / "out/report.html").read_text()


def test_a_job_that_logs_no_held_out_loss_is_refused_after_its_first_run(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(TIED)
    options = ["--hosts", 2, "--steps", 10, "--links", "loopback", "--target-held-out", 2.5]
    done = call("compare", "job.py", "bsp / ring", *options, cwd=tmp_path)
    assert done.returncode == 2 and "job.py does not; log it with run.log(held_out_loss=...)" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_traffic_that_goes_around_the_links_fails_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(hosts=2, bandwidth="1gbit", verify=False) as cluster:
        at = cluster.seats([0])[0]
        monkeypatch.setattr(cluster, "seats", lambda hosts: tuple(at for _ in hosts))  # both on one host
        contender = Contender(name="bsp / ring", strategy=Strategy.parse("bsp / ring"))
        with pytest.raises(JobError, match="went around"):
            trial.run(
                Task(job="wide", args=("--size", "1m"), steps=7),
                cluster,
                contender,
                0,
                tmp_path / "run",
                hosts=cluster.hosts,
            )


def test_a_reading_that_comes_late_is_no_traffic_around_the_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(hosts=2, bandwidth="1gbit", verify=False) as cluster:
        read = cluster.counters
        monkeypatch.setattr(cluster, "counters", lambda: (time.sleep(0.5), read())[1])
        contender = Contender(name="bsp / ring", strategy=Strategy.parse("bsp / ring"))
        task = Task(job="wide", args=("--size", "tiny"), steps=8)
        assert trial.run(task, cluster, contender, 0, tmp_path / "run", hosts=cluster.hosts).steps_s


@pytest.mark.parametrize(
    "peer", [name for name, each in peers.catalogue().items() if not each.hidden | (name == "fsdp")]
)
def test_a_peer_sends_what_it_declares(peer: str, tmp_path: Path) -> None:
    """FSDP aside: Gloo performs its reduce-scatter as an all-reduce, and now and then a process of it aborts."""
    with Cluster(hosts=2, bandwidth="1gbit", verify=False) as cluster:
        task = Task(job="wide", args=("--size", "1m"), steps=21)
        sample = trial.run(task, cluster, Contender(name=peer, peer=peer), 0, tmp_path / "run", hosts=cluster.hosts)
    assert sample.wire_bytes_link is not None
    share = sample.wire_bytes_link / sample.wire_bytes_worker / FRAME
    assert 0.98 < share < {"ddp-powersgd": 1.3}.get(peer, 1.02)


def test_interrupted_it_keeps_what_is_finished(tmp_path: Path) -> None:
    options = ["--hosts", "2", "--steps", "10", "--seeds", "9", "--out", "out", "--json", "result.json"]
    command = [*WEFT, "compare", "wide", "bsp / ring", "bsp / direct", *options, "--", "--size", "tiny"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 120
        while not (tmp_path / "out/02-seed0").exists() and time.monotonic() < until:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        said = "".join(process.communicate(timeout=60))
    assert process.returncode == 130, said
    assert "weft: stopped; finished runs and the report are kept in " in said
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["interrupted"] and result["rows"][0]["error"] is None, said
    assert result["rows"][0]["step_s"] > 0 and result["rows"][1]["error"] == "stopped before it ran"
    assert (tmp_path / "out/report.html").exists()


def test_interrupted_before_the_first_run_is_finished_it_leaves_nothing(tmp_path: Path) -> None:
    command = [*WEFT, "compare", "wide", "bsp / ring", "--hosts", "2", "--", "--size", "tiny"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "one host alone" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "weft: stopped before the first run was finished; nothing was kept\n"
    assert not list(tmp_path.iterdir())


def test_train_on_an_emulated_cluster_with_a_straggler(tmp_path: Path) -> None:
    options = ["--hosts", 2, "--bandwidth", "100mbit", "--link", "1=50mbit", "--slow", "1=2x", "--steps", 6]
    done = call("train", "text", *options, "--json", "-", "--", "--size", "tiny", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["workers"] == 2
    assert "hostname of the client socket" not in done.stderr and "lr_scheduler" not in done.stderr


def test_a_signal_to_the_process_group_lets_a_run_on_an_emulated_cluster_save(tmp_path: Path) -> None:
    """As `timeout` sends it: to the launcher, and to the process that owns the cluster."""
    options = ["--hosts", "2", "--out", "run", "--", "--size", "tiny"]
    with subprocess.Popen(
        [*WEFT, "train", "wide", *options], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        events = tmp_path / "run/events-0.jsonl"
        until = time.monotonic() + 60
        while not (events.exists() and events.stat().st_size) and time.monotonic() < until:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 143 and "; saved in run/checkpoints/step-" in said, said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compare", "wide", "asp / ring"], "cannot be combined"),
        (["compare", "wide", "bsp / ring", "bsp / ring / fused"], "named twice"),
        (["compare", "wide", "--peers", "dpp"], "did you mean 'ddp'"),
        (["compare", "wide", "--systems", "no-such"], "is not a group"),
        (["compare", "wide", "--hosts", "1"], "at least 2"),
        (["compare", "wide", "--hosts", "2", "--slow", "7=4x"], "0 to 1"),
        (["compare", "wide", "--slow", "1=fast"], "4x@10%"),
        (["compare", "wide", "--link", "2:1gbit"], "HOST=RATE"),
        (["compare", "wide", "--bandwidth", "1"], "1gbit"),
        (["compare", "wide", "--compute", "dream"], "real or sleep"),
        (["compare", "wide", "--links", "some"], "loopback"),
        (["compare", "no-such-job"], "does not exist"),
        (["compare", "no-such-job", "bsp / ring", "--", "not", "a strategy"], "does not exist"),
        (["compare", "wide", "--profile", "nowhere.json", "--compute", "sleep"], "cannot be read"),
        (["train", "wide", "--hosts", "2", "--processes", "1"], "leave --processes"),
        (["lab", "up", "--name", "a b"], "letters, digits"),
        (["lab", "down", "--name", "never"], "weft lab up"),
        (["lab", "exec", "0", "--name", "never", "--", "ls"], "weft lab up"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = call(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert done.stderr.startswith("weft: ") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_lab_to_look_around_in(tmp_path: Path) -> None:
    name = f"t{os.getpid()}"
    up = call("lab", "up", "--hosts", 2, "--bandwidth", "1gbit", "--name", name, "--json", "lab.json", cwd=tmp_path)
    try:
        assert up.returncode == 0, up.stderr
        said = json.loads((tmp_path / "lab.json").read_text())
        assert list(said) == ["name", "rows"]
        keys = ["host", "asked_bit_s", "up_bit_s", "down_bit_s", "payload_bytes_s", "address"]
        assert [list(row) for row in said["rows"]] == [keys] * 2
        assert call("lab", "exec", 1, "--name", name, "--", "hostname", cwd=tmp_path).stdout == "host1\n"
        assert call("lab", "exec", 1, "--name", name, "--", "sh", "-c", "exit 3", cwd=tmp_path).returncode == 3
        assert "0 to 1" in call("lab", "exec", 2, "--name", name, "--", "ls", cwd=tmp_path).stderr
        assert "already up" in call("lab", "up", "--name", name, cwd=tmp_path).stderr
    finally:
        down = call("lab", "down", "--name", name, cwd=tmp_path)
    assert down.returncode == 0
    assert "no lab" in call("lab", "down", "--name", name, cwd=tmp_path).stderr


FORBID = """
import os, sys
from weft.lab import namespaces
user, group = os.geteuid(), os.getegid()
namespaces.unshare(namespaces.NEWUSER)
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write(f"0 {user} 1")
open("/proc/self/gid_map", "w").write(f"0 {group} 1")
open("/proc/sys/user/max_net_namespaces", "w").write("0")
os.execv(sys.executable, [sys.executable, "-m", "weft.cli", *sys.argv[1:]])
"""


def forbidden(*args: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command on a system that allows no network namespaces."""
    command = [sys.executable, "-c", FORBID, *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_where_namespaces_are_not_allowed_it_says_so_and_offers_loopback(tmp_path: Path) -> None:
    options = ["wide", "bsp / ring", "--hosts", 2, "--steps", 10, "--seeds", 1, "--out", "out", "--json", "-"]
    refused = forbidden("compare", *options, cwd=tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "allows no network namespaces" in refused.stderr and "--links loopback" in refused.stderr
    assert not list(tmp_path.iterdir())
    done = forbidden("compare", *options, "--links", "auto", "--", "--size", "tiny", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert not result["cluster"]["emulated"] and result["rows"][0]["wire_bytes_link"] is None
    assert "links are not shaped" in done.stderr
