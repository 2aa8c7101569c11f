"""The process that owns an emulated cluster: `python -m weft.lab.cluster_process SPEC`.

Hosts are network namespaces, each with a veth `eth0` into one bridge; what leaves a host is shaped at `eth0`, what
reaches it at the bridge's end of the same cable. All of it hangs on this process. It is the first one of a process
namespace of its own, so that whatever runs on the hosts ends with it, and the kernel takes links and namespaces apart
when nobody is left in them: there is nothing to clean up, however this process ends.

It leaves when its standard input closes (its launcher is gone, however that ended), or when told to.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from weft.lab import control_socket, namespaces
from weft.lab.probe import PACKET_BYTES
from weft.runtime.launch.process_groups import die_with_parent

NETWORK = "10.231.0."
_ROOT = 0xFFFFFFFF
_HANDLE = 0x10000
_BURST_S = 0.001
_QUEUE_S = 0.02
_READS, _READ_S = 5, 0.002
_QUEUE_BYTES = 400_000


def host_address(host: int) -> str:
    return f"{NETWORK}{host + 1}"


class ClusterProcess:
    """Hosts and links, made and read through netlink."""

    def __init__(self, rates: list[int], user: bool) -> None:
        from pyroute2 import IPRoute  # after the namespaces: it may start threads, which would keep the old ones

        self.rates, self.cut = list(rates), [False] * len(rates)
        self.net = IPRoute()
        self.own = {kind: os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for kind, name in _files(user)}
        self.hosts: list[dict[int, int]] = []
        self.inside: list[Any] = []
        self.ports: list[int] = []
        self._bridge()
        for host in range(len(rates)):
            self._host(host)

    def _bridge(self) -> None:
        self.net.link("add", ifname="switch", kind="bridge")
        self.bridge = self.net.link_lookup(ifname="switch")[0]
        self.net.link("set", index=self.bridge, state="up")
        self.net.link("set", index=self.net.link_lookup(ifname="lo")[0], state="up")
        Path("/run/netns").mkdir(parents=True)
        names = "".join(f"{way}{host_address(h)} host{h}\n" for h in range(len(self.rates)) for way in ("", "::ffff:"))
        Path("/run/hosts").write_text(f"127.0.0.1 localhost\n{names}", encoding="utf-8")
        with contextlib.suppress(OSError):
            namespaces.bind("/run/hosts", "/etc/hosts")

    def _host(self, host: int) -> None:
        """A host with its cable: `eth0` on its side, `host<i>` on the bridge's."""
        from pyroute2 import IPRoute

        with self.own_namespaces():
            namespaces.unshare(namespaces.NEWNET | namespaces.NEWUTS)
            namespaces.hostname(f"host{host}")
            with contextlib.suppress(OSError):
                Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
            kinds = {namespaces.NEWNET: "net", namespaces.NEWUTS: "uts"}
            fds = {kind: os.open(f"/proc/thread-self/ns/{name}", os.O_RDONLY) for kind, name in kinds.items()}
            inside = IPRoute()
            named = Path(f"/run/netns/host{host}")
            named.touch()
            namespaces.bind("/proc/thread-self/ns/net", str(named))
        self.hosts.append(self.own | fds)
        self.inside.append(inside)
        peer = {"ifname": "eth0", "net_ns_fd": fds[namespaces.NEWNET]}
        self.net.link("add", ifname=f"host{host}", kind="veth", peer=peer)
        port = self.net.link_lookup(ifname=f"host{host}")[0]
        self.ports.append(port)
        eth0 = inside.link_lookup(ifname="eth0")[0]
        inside.addr("add", index=eth0, address=host_address(host), prefixlen=24)
        inside.link("set", index=inside.link_lookup(ifname="lo")[0], state="up")
        self.net.link("set", index=port, master=self.bridge)
        for net, index in ((inside, eth0), (self.net, port)):
            net.tc("add", "tbf", index, handle=_HANDLE, parent=_ROOT, **_shape(self.rates[host]))
            net.link("set", index=index, state="up")

    @contextlib.contextmanager
    def own_namespaces(self) -> Iterator[None]:
        """Inside, this process may enter other namespaces; afterwards it is in its own again."""
        try:
            yield
        finally:
            namespaces.setns(self.own[namespaces.NEWNET], namespaces.NEWNET)
            namespaces.setns(self.own[namespaces.NEWUTS], namespaces.NEWUTS)

    # --- requests over the control socket ---------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        return {"addresses": [host_address(h) for h in range(len(self.rates))], "rates": self.rates, "cut": self.cut}

    def rate(self, host: int, bit_s: int) -> dict[str, Any]:
        """Another rate for a host's link, both ways."""
        self.rates[host] = bit_s
        for net, index in self._ends(host):
            net.tc("change", "tbf", index, handle=_HANDLE, parent=_ROOT, **_shape(bit_s))
        return {}

    def link(self, host: int, up: bool) -> dict[str, Any]:
        """Cut a host's link, as if its cable were pulled, or mend it."""
        self.cut[host] = not up
        self.net.link("set", index=self.ports[host], state="up" if up else "down")
        return {}

    def counters(self) -> dict[str, Any]:
        """Bytes that each link has carried, up from its host and down to it, as the shaper counts them, with headers;
        and when each was read."""
        rows, times = [], []
        for host in range(len(self.rates)):
            read = [_carried(net, index) for net, index in self._ends(host)]
            rows.append([count for count, _ in read])
            times.append([moment for _, moment in read])
        return {"bytes": rows, "at": times}

    def measure(self, senders: list[list[int]], seconds: float) -> dict[str, Any]:
        """Let hosts send to hosts at once, as fast as they can: what links carried, and the payload of each pair."""
        from weft.lab.probe import flood

        return flood(self, [(a, b) for a, b in senders], seconds)

    def enter_host(self, host: int, kind: int) -> None:
        namespaces.setns(self.hosts[host][kind], kind)

    def _ends(self, host: int) -> list[tuple[Any, int]]:
        """Where a link is shaped: up at the host's end, down at the bridge's."""
        inside = self.inside[host]
        return [(inside, inside.link_lookup(ifname="eth0")[0]), (self.net, self.ports[host])]


def _files(user: bool) -> list[tuple[int, str]]:
    kinds = [(namespaces.NEWNS, "mnt"), (namespaces.NEWNET, "net"), (namespaces.NEWUTS, "uts")]
    kinds += [(namespaces.NEWPID, "pid")]
    return [(namespaces.NEWUSER, "user"), *kinds] if user else kinds


def _shape(bit_s: int) -> dict[str, int]:
    """A token bucket of this rate; its queue is long enough for several senders to one host."""
    rate = bit_s // 8
    limit = max(_QUEUE_BYTES, int(rate * _QUEUE_S))
    return {"rate": rate, "burst": max(PACKET_BYTES, int(rate * _BURST_S)), "limit": limit}


def _carried(net: Any, index: int) -> tuple[int, float]:
    """A shaper's bytes and the moment they were read; read again where that moment is uncertain."""
    for _ in range(_READS):
        before = time.monotonic()
        qdiscs = net.get_qdiscs(index=index)
        after = time.monotonic()
        if after - before < _READ_S:
            break
    mine = next(qdisc for qdisc in qdiscs if qdisc["handle"] == _HANDLE)
    return int(mine.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")["bytes"]), (before + after) / 2


# --- the process ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Announces on standard output, in one JSON line, that the cluster is there or why it cannot be."""
    spec = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a person's Ctrl-C is for the launcher, which ends us
    if not spec.get("detached"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to a process group, it lets a run save on its hosts
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(control_socket.address(spec["name"]))
        listener.listen()
    except OSError:
        _announce({"error": f"a lab '{spec['name']}' is already up; `weft lab down` ends it, --name gives another"})
        return
    try:
        user = namespaces.isolate()
    except OSError as error:
        _announce({"error": f"this system allows no network namespaces ({error.strerror})", "refused": True})
        return
    first = os.fork()
    if first:
        listener.close()
        sys.stdin.close()
        _, status = os.waitpid(first, 0)
        sys.exit(os.waitstatus_to_exitcode(status) & 255)
    die_with_parent()
    try:
        namespaces.private_mounts()
        cluster = ClusterProcess(spec["rates"], user)
    except ImportError:
        _announce({"error": "the lab needs pyroute2; pip install pyroute2", "refused": True})
        os._exit(1)
    except Exception as error:
        _announce({"error": f"the emulated cluster cannot be made here: {error}", "refused": True})
        os._exit(1)
    _announce({"addresses": cluster.describe()["addresses"]})
    with contextlib.suppress(KeyboardInterrupt):
        _serve(cluster, listener, attached=not spec.get("detached"))
    os._exit(0)


def _announce(word: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


def _serve(cluster: ClusterProcess, listener: socket.socket, *, attached: bool) -> None:
    doors = selectors.DefaultSelector()
    doors.register(listener, selectors.EVENT_READ)
    if attached:
        doors.register(sys.stdin.buffer, selectors.EVENT_READ)
    while True:
        _reap()
        for key, _ in doors.select(timeout=1.0):
            if key.fileobj is listener:
                end, _ = listener.accept()
                if control_socket.credentials(end)[1] == os.getuid():
                    doors.register(end, selectors.EVENT_READ)
                else:
                    end.close()
            elif isinstance(key.fileobj, socket.socket):
                try:
                    request = control_socket.receive(key.fileobj)
                except Exception:
                    doors.unregister(key.fileobj)
                    key.fileobj.close()
                    continue
                if request["do"] == "end":
                    return
                _answer(cluster, key.fileobj, request)
            elif not os.read(sys.stdin.fileno(), 1):
                return


def _answer(cluster: ClusterProcess, end: socket.socket, request: dict[str, Any]) -> None:
    do = request.pop("do")
    try:
        if do == "enter":
            if not 0 <= request["host"] < len(cluster.hosts):
                raise ValueError(
                    f"there is no host {request['host']}; hosts are numbered 0 to {len(cluster.hosts) - 1}"
                )
            mine = cluster.hosts[request["host"]]
            kinds = [kind for kind in control_socket.KINDS if kind in mine]
            socket.send_fds(end, [json.dumps({"kinds": kinds}).encode()], [mine[kind] for kind in kinds])
            return
        actions: dict[str, Callable[..., dict[str, Any]]] = {
            "describe": cluster.describe,
            "rate": cluster.rate,
            "link": cluster.link,
        }
        actions |= {"counters": cluster.counters, "measure": cluster.measure}
        control_socket.send(end, actions[do](**request))
    except Exception as error:
        with contextlib.suppress(OSError):
            control_socket.send(end, {"error": str(error)})


def _reap() -> None:
    """The first process of a namespace inherits its orphans."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
