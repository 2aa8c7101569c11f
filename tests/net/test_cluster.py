"""The emulated cluster: what its hosts see, what its links carry and count, and that nothing of it is ever left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.errors import JobError, UserError
from weft.lab.cluster import Cluster
from weft.lab.cluster_process import host_address
from weft.units import Bandwidth

HERE = Path(__file__).parent
FRAME = 1514 / 1448
"""A full frame over its payload, with the headers of Ethernet, IP and TCP."""

SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 4000), timeout=10) as end:
    end.sendall(bytes(int(sys.argv[2])))
    end.shutdown(socket.SHUT_WR)
    end.recv(1)
"""
RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 4000)) as listener:
    print("listening", flush=True)
    end, _ = listener.accept()
    while end.recv(1 << 20):
        pass
"""


def run(cluster: Cluster, host: int, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*cluster.command(host), *command], capture_output=True, text=True, timeout=60, check=False)


def send(cluster: Cluster, count: int) -> subprocess.CompletedProcess[str]:
    """So many bytes from host 0 to host 1."""
    addresses = cluster.ask("describe")["addresses"]
    command = [*cluster.command(1), sys.executable, "-c", RECEIVE, addresses[1]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None and receiver.stdout.readline() == "listening\n"
        sent = run(cluster, 0, sys.executable, "-c", SEND, addresses[1], str(count))
        receiver.kill()
    return sent


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(hosts=3, bandwidth="200mbit", links={2: "50mbit"}) as made:
        yield made


# --- hosts ----------------------------------------------------------------------------------------------------------


def test_a_host_has_a_name_an_address_and_one_cable(cluster: Cluster) -> None:
    look = "import socket; print(socket.gethostname(), sorted(name for _, name in socket.if_nameindex()))"
    said = run(cluster, 1, sys.executable, "-c", look)
    assert said.stdout.split(maxsplit=1) == ["host1", "['eth0', 'lo']\n"], said.stderr
    resolve = "import socket; print(socket.gethostbyname('host2'))"
    assert run(cluster, 0, sys.executable, "-c", resolve).stdout.strip() == "10.231.0.3"


def test_a_host_knows_the_name_of_another_by_either_form_of_its_address(cluster: Cluster) -> None:
    """PyTorch's store accepts connections on an IPv6 socket and asks for the name of their address."""
    for address in (host_address(1), f"::ffff:{host_address(1)}"):
        asked = f"import socket; print(socket.getnameinfo(('{address}', 1), socket.NI_NAMEREQD)[0])"
        assert run(cluster, 0, sys.executable, "-c", asked).stdout == "host1\n"


def test_a_command_keeps_its_folder_its_status_and_its_death(cluster: Cluster) -> None:
    assert run(cluster, 0, "pwd").stdout.strip() == os.getcwd()
    assert run(cluster, 0, "sh", "-c", "exit 7").returncode == 7
    assert run(cluster, 0, "sh", "-c", "kill -9 $$").returncode == -signal.SIGKILL
    assert run(cluster, 0, "no-such-command").returncode == 127


def test_who_enters_sees_only_the_labs_processes(cluster: Cluster) -> None:
    assert run(cluster, 0, "sh", "-c", "echo $$").stdout.strip() != "1"
    assert int(run(cluster, 0, "sh", "-c", "echo $$").stdout) < 1000


# --- links ----------------------------------------------------------------------------------------------------------


def test_links_were_measured_before_use_and_carry_what_was_asked(cluster: Cluster) -> None:
    """`Cluster` refuses what is off by more than 3 %; here: that it measured, and the right links."""
    for link, asked in zip(cluster.links, ("200mbit", "200mbit", "50mbit"), strict=True):
        assert link.rate == Bandwidth.parse(asked)
        for rate in (link.up_bit_s, link.down_bit_s):
            assert rate is not None and abs(rate / link.rate - 1) <= 0.03
        assert link.payload_bytes_s is not None and 0.9 < link.payload_bytes_s * 8 / link.rate < 1


@pytest.mark.parametrize("rate", ["100mbit", "1gbit"])
def test_rates(rate: str) -> None:
    with Cluster(hosts=2, bandwidth=rate) as cluster:
        assert all(link.payload_bytes_s for link in cluster.links)


def test_counters_count_what_crosses_a_link_and_nothing_else(cluster: Cluster) -> None:
    before = cluster.counters()
    assert send(cluster, 4_000_000).returncode == 0
    after = cluster.counters()
    assert before is not None and after is not None
    (up0, _), (_, down1), others = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)]
    assert up0 == pytest.approx(4_000_000 * FRAME, rel=0.02)
    assert down1 == pytest.approx(4_000_000 * FRAME, rel=0.02)
    assert sum(others) < 10_000  # a question for an address now and then


def test_a_cut_link_carries_nothing_until_it_is_mended(cluster: Cluster) -> None:
    cluster.cut(1)
    probe = "import socket; socket.create_connection(('host1', 4000), timeout=0.5)"
    said = run(cluster, 0, sys.executable, "-c", probe)
    assert said.returncode == 1 and ("TimeoutError" in said.stderr or "No route" in said.stderr)
    cluster.mend(1)
    assert send(cluster, 1000).returncode == 0


def test_a_rate_can_change(cluster: Cluster) -> None:
    cluster.rate(0, "100mbit")
    cluster.links = [
        link if link.host else type(link)(host=0, rate=Bandwidth.parse("100mbit")) for link in cluster.links
    ]
    cluster.check_rates()


def test_what_the_machine_cannot_carry_is_refused() -> None:
    with pytest.raises(JobError, match=r"host \d carries .* lower --bandwidth"), Cluster(4, "30gbit"):
        pass


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hosts": 0}, "1 to 64"),
        ({"hosts": 2, "bandwidth": "fast"}, "1gbit"),
        ({"hosts": 2, "bandwidth": "400gbit"}, "1mbit to 30gbit"),
        ({"hosts": 2, "links": {5: "1gbit"}}, "0 to 1"),
    ],
)
def test_bad_input(options: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Cluster(**options)


# --- nothing is left ------------------------------------------------------------------------------------------------


def traces() -> dict[str, set[str]]:
    """What a lab could leave on this machine: processes, network namespaces, interfaces, sockets."""
    found: dict[str, set[str]] = {"process": set(), "namespace": set()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
                found["namespace"].add(os.readlink(entry / "ns/net"))
                if "weft.lab" in words or "weft-sleeper" in words:
                    found["process"].add(words.replace("\0", " "))
            except OSError:
                continue
    found["interface"] = {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}
    sockets = Path("/proc/net/unix").read_text().splitlines()
    found["socket"] = {line.split()[-1] for line in sockets if "weft-lab" in line}
    found["file"] = {str(path) for path in Path("/tmp").glob("weft-lab*")} | {
        str(path) for folder in ("/run/netns", "/var/run/netns") for path in Path(folder).glob("host*")
    }
    return found


def test_ten_cycles_leave_nothing() -> None:
    before = traces()
    for _ in range(10):
        with Cluster(hosts=3, bandwidth="1gbit", verify=False) as cluster:
            assert len(traces()["process"]) > len(before["process"])
            cluster.counters()
    assert settled(before) == before


LAUNCHER = """
import subprocess, sys
from weft.lab.cluster import Cluster
with Cluster(hosts=2, bandwidth="1gbit", verify=False) as cluster:
    at = [*cluster.command(1), "sh", "-c", "sleep 600; echo weft-sleeper"]
    sleeper = subprocess.Popen(at)
    print(cluster._process.pid, flush=True)
    sys.stdin.read()
"""


def first_process(owner: int) -> int:
    return int(Path(f"/proc/{owner}/task/{owner}/children").read_text().split()[0])


@pytest.mark.parametrize("victim", ["launcher", "owner", "first process"])
def test_kill_9_leaves_nothing(victim: str) -> None:
    before = traces()
    command = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None and launcher.stdin is not None
        owner = int(launcher.stdout.readline())
        until = time.monotonic() + 10
        while not any("weft-sleeper" in words for words in traces()["process"]) and time.monotonic() < until:
            time.sleep(0.05)
        assert any("weft-sleeper" in words for words in traces()["process"])
        os.kill({"launcher": launcher.pid, "owner": owner, "first process": first_process(owner)}[victim], 9)
        if victim != "launcher":
            launcher.kill()
    assert settled(before) == before


def settled(before: dict[str, set[str]], within_s: float = 10) -> dict[str, set[str]]:
    """What is left when the kernel has had a moment to take namespaces apart; other tests' own things aside."""
    until = time.monotonic() + within_s
    while traces() != before and time.monotonic() < until:
        time.sleep(0.1)
    return traces()


# --- and all of it without root -------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="this very run is by an ordinary user")
def test_all_of_this_as_an_ordinary_user() -> None:
    tests = [f"{__file__}::{name}" for name in globals() if name.startswith("test_") and "ordinary" not in name]
    pytest_there = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    command = [sys.executable, str(HERE / "ordinary.py"), *pytest_there]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
