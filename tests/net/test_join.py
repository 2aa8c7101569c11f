"""Servers and workers on several machines, each a network namespace: by nodes, by hand, under torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.lab.cluster import Cluster
from weft.runtime.launch.launcher import _seat
from weft.runtime.launch.rendezvous import TOLD, Rendezvous, reach, take_assignment
from weft.runtime.launch.spec import Launch
from weft.runtime.record.run_folder import events
from weft.store.checkpoint import Policy
from weft.strategy import Strategy
from weft.transport.messaging import Key

WEFT = [sys.executable, "-m", "weft.cli"]
JOB = """
import time
import torch, weft
from torch import nn

run = weft.init(steps={steps})
model = nn.Linear(5, 2)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = run.distribute(model, optimizer)
for x in run.shard([torch.full((3, 5), 0.1 * i) for i in range(24)], epochs=None):
    time.sleep({sleep})
    loss = (model(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=loss)
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Cluster]:
    with Cluster(hosts=3, bandwidth="1gbit", verify=False) as made:
        yield made


def script(folder: Path, steps: int = 8, sleep: float = 0.0) -> None:
    (folder / "job.py").write_text(JOB.format(steps=steps, sleep=sleep))
    done = subprocess.run([*WEFT, "key", "key"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def start(machines: Cluster, host: int, *command: Any, cwd: Path, **env: str) -> subprocess.Popen[str]:
    line = [*machines.command(host), *map(str, command)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(line, cwd=cwd, env=os.environ | env, **pipes)


def ended(*processes: subprocess.Popen[str]) -> list[str]:
    said = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return said


def losses(folder: Path, workers: int) -> list[float]:
    """What the same job learns on one machine, without servers."""
    line = [*WEFT, "train", "job.py", "-n", str(workers), "--out", "alone", "--save-every", "0"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 0, done.stderr
    return [event["loss"] for event in events(folder / "alone")]


def test_by_nodes_the_last_ranks_are_servers(machines: Cluster, tmp_path: Path) -> None:
    script(tmp_path)
    how = ["-n", 3, "--strategy", "bsp / parameter_server", "--nodes", 2, "--rendezvous", "10.231.0.1:29501"]
    how += ["--key-file", "key", "--out", "run"]
    nodes = [start(machines, n, *WEFT, "train", "job.py", "--node-rank", n, *how, cwd=tmp_path) for n in (0, 1)]
    ended(*nodes)
    assert [event["loss"] for event in events(tmp_path / "run")] == losses(tmp_path, 3)


def test_by_hand_whoever_has_the_key_gets_a_seat(machines: Cluster, tmp_path: Path) -> None:
    script(tmp_path)
    how = ["-n", 2, "--strategy", "bsp / parameter_server", "--join", 2, "--rendezvous", "10.231.0.1:29502"]
    first = start(machines, 0, *WEFT, "train", "job.py", *how, "--key-file", "key", "--out", "run", cwd=tmp_path)
    others = [
        start(machines, host, *WEFT, "join", "10.231.0.1:29502", "--key-file", "key", cwd=tmp_path) for host in (1, 2)
    ]
    said = ended(first, *others)
    assert "joins as process 1" in said[0] and "joins as process 2" in said[0]
    assert sorted(text.split(" of job")[0].split(" is ")[1] for text in said[1:]) == ["server 0", "worker 1"]
    assert [event["loss"] for event in events(tmp_path / "run")] == losses(tmp_path, 2)


def test_a_lost_worker_may_come_back_from_another_machine(machines: Cluster, tmp_path: Path) -> None:
    script(tmp_path, steps=40, sleep=0.2)
    how = ["-n", 2, "--strategy", "asp / parameter_server", "--join", 1, "--rendezvous", "10.231.0.1:29503"]
    run = start(machines, 0, *WEFT, "train", "job.py", *how, "--key-file", "key", "--out", "run", cwd=tmp_path)
    joining = [*WEFT, "join", "10.231.0.1:29503", "--key-file", "key"]
    server = start(machines, 1, *joining, cwd=tmp_path)
    file = tmp_path / "run/events-1.jsonl"
    until = time.monotonic() + 60
    while (not file.exists() or not file.stat().st_size) and time.monotonic() < until:
        time.sleep(0.1)
    victims = [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _is_worker(folder, 1, tmp_path)]
    assert victims
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    time.sleep(1)
    back = start(machines, 2, *joining, cwd=tmp_path)
    said = ended(run, server, back)
    assert "worker 1 was ended by SIGKILL; the others continue" in said[0]
    assert "joins as process 1" in said[0] and "is worker 1 of job" in said[2]
    steps = [json.loads(line)["step"] for line in file.read_text().splitlines()]
    assert steps[-1] == 40 and len(steps) <= 42  # it went on where it was


def _is_worker(process: Path, rank: int, cwd: Path) -> bool:
    try:
        return (process / "comm").read_text() == f"weft-worker-{rank}\n" and (process / "cwd").resolve() == cwd
    except OSError:
        return False


def test_strangers_and_wrong_keys_are_told_in_one_sentence(machines: Cluster, tmp_path: Path) -> None:
    script(tmp_path, steps=1000, sleep=0.2)
    subprocess.run([*WEFT, "key", "other"], cwd=tmp_path, check=True, capture_output=True)
    how = ["-n", 1, "--strategy", "asp / parameter_server", "--rendezvous", "10.231.0.1:29504", "--key-file", "key"]
    run = start(machines, 0, *WEFT, "train", "job.py", *how, "--out", "run", cwd=tmp_path)
    time.sleep(3)
    for file, sentence in (("other", "host1"), ("missing", "copy it from where the run was started")):
        joining = start(machines, 1, *WEFT, "join", "10.231.0.1:29504", "--key-file", file, cwd=tmp_path)
        said, _ = joining.communicate(timeout=60)
        assert joining.returncode == 2 and sentence in said and len(said.strip().splitlines()) == 1, said
    full = start(machines, 1, *WEFT, "join", "10.231.0.1:29504", "--key-file", "key", cwd=tmp_path)
    said, _ = full.communicate(timeout=60)
    run.terminate()
    run.communicate(timeout=60)
    assert full.returncode == 2 and "every rank of this run is taken" in said, said
    assert run.returncode == 143


def here(folder: Path, *command: Any) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*map(str, command)], cwd=folder, **pipes)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_seat_sets_known_variables_only(tmp_path: Path) -> None:
    """A desk that wants the joiner to import a file of its choosing is refused before anything runs."""
    script(tmp_path)
    (tmp_path / "evil/compression").mkdir(parents=True)
    (tmp_path / "evil/compression/mine.py").write_text(f"open({str(tmp_path / 'proof')!r}, 'w')\n")
    env = {"RANK": "0", "WORLD_SIZE": "1", "WEFT_WORKERS": "1", "WEFT_CLI_STRATEGY": "asp / parameter_server"}
    seat = {"job": str(tmp_path / "job.py"), "args": [], "env": env | {"WEFT_PATH": str(tmp_path / "evil")}}
    key = Key.read(tmp_path / "key")
    rendezvous = Rendezvous(("127.0.0.1", 0), key, encrypted=True, vacant=[0], seat=lambda rank: seat)
    try:
        joining = here(tmp_path, *WEFT, "join", "{}:{}".format(*rendezvous.address), "--key-file", "key")
        said, _ = joining.communicate(timeout=60)
    finally:
        rendezvous.close()
    assert joining.returncode == 2 and "WEFT_PATH" in said and len(said.strip().splitlines()) == 1, said
    assert not (tmp_path / "proof").exists()


def test_two_hosts_with_long_names_are_two(tmp_path: Path) -> None:
    key, said = Key.make(tmp_path / "key"), list[str]()
    seat = {"job": "job.py", "args": [], "env": {"RANK": "0", "WEFT_CLI_STRATEGY": "asp / parameter_server"}}
    rendezvous = Rendezvous(
        ("127.0.0.1", 0), key, encrypted=False, vacant=[0, 1], seat=lambda rank: seat, said=said.append
    )
    at = "{}:{}".format(*rendezvous.address)
    joined = [reach(at, key, f"{'host' * 20}, process {number}", encrypted=False) for number in (1, 2)]
    for each in joined:
        take_assignment(each, 10)
    for each in joined:
        each.close()
    until = time.monotonic() + 10
    while len(said) < 4 and time.monotonic() < until:
        time.sleep(0.02)
    rendezvous.close()
    assert sum("left" in text for text in said) == 2


def test_what_a_run_tells_is_what_a_seat_may_set(tmp_path: Path) -> None:
    policy = Policy(every=5)
    spec = Launch(job="text", strategy=Strategy.parse("asp / parameter_server"), servers=1, rendezvous="127.0.0.1:1")
    spec = replace(spec, steps=1, seed=1, out=tmp_path, trace=True, share_gpus=True, policy=policy, resume=tmp_path)
    told = {name for rank in (0, 1) for name in _seat(spec, Path("job.py"), rank)["env"]}
    assert told == TOLD


def test_the_first_process_of_a_container_may_join(tmp_path: Path) -> None:
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    script(tmp_path)
    at = f"127.0.0.1:{free_port()}"
    how = ["-n", 1, "--strategy", "asp / parameter_server", "--join", 1, "--rendezvous", at, "--key-file", "key"]
    run = here(tmp_path, *WEFT, "train", "job.py", *how, "--out", "run", "--", "--fast")
    said = ended(run, here(tmp_path, *apart, *WEFT, "join", at, "--key-file", "key"))[1]
    assert "is server 0 of job" in said and f"runs {tmp_path / 'job.py'} --fast" in said


def test_a_joined_server_leaves_when_the_run_ends_before_all_workers_came(tmp_path: Path) -> None:
    script(tmp_path, steps=1000, sleep=0.2)
    at = f"127.0.0.1:{free_port()}"
    how = ["-n", 2, "--strategy", "asp / parameter_server", "--join", 2, "--rendezvous", at, "--key-file", "key"]
    run = here(tmp_path, *WEFT, "train", "job.py", *how, "--out", "run")
    (tmp_path / "absent.py").write_text("import time; time.sleep(100)")
    joining = [*WEFT, "join", at, "--key-file", "key"]
    absent = here(tmp_path, *joining, "--job", "absent.py")  # has worker 1's seat, and never comes to the server
    assert absent.stdout is not None and "worker 1" in absent.stdout.readline()
    server = here(tmp_path, *joining)
    assert server.stdout is not None and "server 0" in server.stdout.readline()
    file, until = tmp_path / "run/events-0.jsonl", time.monotonic() + 60
    while (not file.exists() or not file.stat().st_size) and time.monotonic() < until:
        time.sleep(0.1)
    run.kill()  # worker 0 is at its steps
    run.communicate(timeout=60)
    said, _ = server.communicate(timeout=90)
    absent.kill()
    absent.communicate(timeout=60)
    assert server.returncode == 1 and "the run ended before every worker had joined" in said, said


def test_under_torchrun_the_last_ranks_are_servers(machines: Cluster, tmp_path: Path) -> None:
    script(tmp_path)
    env = {"WEFT_STRATEGY": "bsp / parameter_server", "WEFT_KEY_FILE": str(tmp_path / "key"), "WEFT_OUT": "run"}
    line = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2]
    line += ["--master-addr", "10.231.0.1", "--master-port", 29505]
    env["GLOO_SOCKET_IFNAME"] = "eth0"
    nodes = [start(machines, n, sys.executable, *line, "--node-rank", n, "job.py", cwd=tmp_path, **env) for n in (0, 1)]
    said = ended(*nodes)
    assert "".join(said).count("done") == 3
    assert [event["loss"] for event in events(tmp_path / "run")] == losses(tmp_path, 3)
