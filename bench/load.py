"""Parameter servers under load: many clients, each pushing and pulling as fast as it can, for a while.

    python bench/load.py                          64 clients, 4 servers, two minutes

Clients are threads of a few processes. Printed: steps, errors, latencies of pulls, and how servers' memory grew between
the first quarter and the end.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.compression.dense import Dense
from weft.ops import Spec
from weft.runtime.server.bundle_state import BundleState
from weft.runtime.server.client import ServerClient
from weft.runtime.server.service import ShardService
from weft.synchrony.asp import Asp
from weft.topology._shards import Range
from weft.transport.messaging import Client, Key


def serve(tell: Any, file: Path, workers: int, values: int, encrypted: bool) -> None:
    torch.set_num_threads(1)
    part = nn.Parameter(torch.zeros(values))
    server = ShardService(
        ("127.0.0.1", 0),
        Key.read(file),
        synchrony=Asp(),
        compression=Dense(),
        kept=[BundleState([Spec("part", (values,))], [part], torch.optim.SGD([part], lr=0.1))],
        workers=workers,
        encrypted=encrypted,
    )
    tell.send(server.address)
    while tell.recv() == "memory":
        tell.send((resident_bytes(), server.version))
    server.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def load(
    tell: Any, file: Path, addresses: list[Any], ranks: list[int], values: int, seconds: float, encrypted: bool
) -> None:
    torch.set_num_threads(1)
    key = Key.read(file)
    bundles = [[(Range(f"part{number}", 0, values),)] for number in range(len(addresses))]
    names = [f"part{number}" for number in range(len(addresses))]
    took: list[float] = []
    errors: list[str] = []

    def client(rank: int) -> None:
        try:
            links = [Client(tuple(each), key, f"worker {rank}", encrypted=encrypted) for each in addresses]
            specs = {name: Spec(name, (values,)) for name in names}
            asking = ServerClient(rank, links, bundles, specs, Dense())
            model = {name: torch.zeros(values) for name in names}
            grads = {name: torch.ones(values) for name in names}
            _, started = asking.join(60)
            if rank == 0 and not started:
                asking.start(model, {}, (), 60)
            until = time.monotonic() + seconds
            for step in itertools.takewhile(lambda _: time.monotonic() < until, itertools.count()):
                began = time.perf_counter()
                asking.pull(model).wait(60)
                took.append(time.perf_counter() - began)
                asking.begin(step, 1.0, [{}])
                for name, grad in grads.items():
                    asking.push(name, grad, step)
            asking.leave(60)
        except Exception as error:
            errors.append(f"worker {rank}: {error}")

    threads = [threading.Thread(target=client, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tell.send((took, errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--processes", type=int, default=8, help="that the clients are threads of")
    parser.add_argument("--values", type=int, default=16384, help="float32 values that each server keeps")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--encrypted", action="store_true")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")

    def start(act: Any, *rest: Any) -> tuple[Any, Any]:
        ours, theirs = context.Pipe()
        process = context.Process(target=act, args=(theirs, *rest), daemon=True)
        process.start()
        return process, ours

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "key"
        Key.make(file)
        servers = [start(serve, file, args.clients, args.values, args.encrypted) for _ in range(args.servers)]
        addresses = [pipe.recv() for _, pipe in servers]
        groups = [list(range(first, args.clients, args.processes)) for first in range(args.processes)]
        loads = [start(load, file, addresses, ranks, args.values, args.seconds, args.encrypted) for ranks in groups]
        time.sleep(args.seconds / 4)
        before = [_ask(pipe) for _, pipe in servers]
        said = [pipe.recv() for _, pipe in loads]
        after = [_ask(pipe) for _, pipe in servers]
        for _, pipe in servers:
            pipe.send("end")
    took = [each for times, _ in said for each in times]
    errors = [error for _, found in said for error in found]
    cuts = statistics.quantiles(took, n=100)
    grown = max(now[0] - then[0] for now, then in zip(after, before, strict=True)) / 1e6
    print(f"{args.clients} clients, {args.servers} servers, {args.seconds:g} s, {4 * args.values / 1e3:g} KB a server")
    print(f"steps {len(took)}, errors {len(errors)} {errors[:1] or ''}")
    middle, high = cuts[49], cuts[98]
    print(f"a pull from all servers: median {1e3 * middle:.1f} ms, p99 {1e3 * high:.1f} ms ({high / middle:.1f} x)")
    print(f"a server's memory: {after[0][0] / 1e6:.0f} MB, grown by {grown:.1f} MB since the first quarter")


def _ask(pipe: Any) -> Any:
    pipe.send("memory")
    return pipe.recv()


if __name__ == "__main__":
    sys.exit(main())
